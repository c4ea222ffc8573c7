"""A whole training with its state saved at every k-th step: total time, and how much of it the loop stood still.

The experiment of the DataStates-LLM papers at a small machine's size: a GPT in fp32 on the CPU, whose forward,
backward and update compete with the writer for the same cores and memory. Each contender trains the same number of
steps from the same start.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Series, clock, make_durable, rotations
from benchmarks.ours import Ours
from benchmarks.peers import DistributedAsyncSave, Saver, TorchSave
from benchmarks.save import BarrierClock, Rows
from benchmarks.training_state import filled, gpt

COLUMNS = {"total": "s", "against none": "x", "step": "s", "stall per save": "s"}
Contender = tuple[str, int, Callable[[Path], Saver] | None]

CONTENDERS: list[Contender] = [
    ("no capture", 0, None),
    *((f"DSHistory every {every}", every, Ours) for every in (1, 2, 5, 10)),
    *((f"torch.save every {every}", every, lambda *_: TorchSave()) for every in (1, 10)),
    *((f"DCP async_save every {every}", every, lambda *_: DistributedAsyncSave()) for every in (1, 10)),
]


def run(scratch: Path, *, state_bytes: int, steps: int, times: int, batch: int) -> tuple[Rows, dict[str, object]]:
    """Every contender, `times` rotations; total time is until the last checkpoint is durable."""
    rows: Rows = {name: defaultdict(Series) for name, _, _ in CONTENDERS}
    for name, every, make in rotations(CONTENDERS, times=times):
        figures = _train(scratch, make, every=every, state_bytes=state_bytes, steps=steps, batch=batch)
        for figure, value in figures.items():
            rows[name][figure].add(value)
    base = rows["no capture"]["total"].median
    for figures in rows.values():
        figures["against none"] = Series([total / base for total in figures["total"].values])
    settings = {"state_bytes": state_bytes, "steps": steps, "batch": batch, "rotations": times}
    return rows, settings


def _train(
    scratch: Path,
    make: Callable[[Path], Saver] | None,
    *,
    every: int,
    state_bytes: int,
    steps: int,
    batch: int,
) -> dict[str, float]:
    training = filled(gpt(state_bytes))
    tokens = torch.randint(0, 256, (batch, 129), generator=torch.Generator().manual_seed(1))
    root = scratch / "training"
    root.mkdir()
    make_durable(scratch)
    barrier = BarrierClock(training)
    saver = make(root) if make else None
    if saver is not None:
        saver.ready(training)
    barrier.seal()
    stalled = 0.0
    with clock() as total:
        for step in range(1, steps + 1):
            training.optimizer.zero_grad()
            training.model(tokens[:, :-1], tokens[:, 1:]).backward()
            stalled += _before_update(saver)
            training.update()
            stalled += barrier.seconds
            if saver is not None and step % every == 0:
                folder = root / f"{step}"
                folder.mkdir()
                with clock() as call:
                    saver.begin(training, folder)
                stalled += call.seconds
        if saver is not None:
            saver.durable()
    if saver is not None:
        saver.close()
    shutil.rmtree(root)
    saves = steps // every if every else 0
    return {"total": total.seconds, "step": total.seconds / steps} | (
        {"stall per save": stalled / saves} if saves else {}
    )


def _before_update(saver: Saver | None) -> float:
    started = time.perf_counter()
    if saver is not None:
        saver.before_update()
    return time.perf_counter() - started
