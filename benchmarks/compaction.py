"""Compaction beside a training: what a step costs with it, without it, and without capture, in turn.

A GPT trains on the CPU with AdamW in fp32, on all cores but one, for on a machine without a free core nothing is
packed. *Step* is a window of the training divided by its steps; *against none* compares it with the training without
capture of the same rotation, and *against raw* with the one whose checkpoints stay as they are. *Packed* counts the
checkpoints that were packed in the window, and *of the raw* is what they take.
"""

import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

import capture
from benchmarks.measure import Rows, Series, clock, rotations
from benchmarks.training_state import Training, filled, gpt

COLUMNS = {"step": "s", "against none": "x", "against raw": "x", "packed": "", "of the raw": "%"}


@dataclass(frozen=True)
class Contender:
    """A training, captured or not, and compacted or not."""

    name: str
    captured: bool = True
    compact: bool = False


NONE, RAW = "no capture", "captured"
CONTENDERS = [Contender(NONE, captured=False), Contender(RAW), Contender("captured and compacted", compact=True)]


def run(
    scratch: Path, *, state_bytes: int, times: int, steps: int, every: int, batch: int
) -> tuple[Rows, dict[str, object]]:
    """Measure every contender in `times` rotations on one model that keeps training."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    try:
        training = filled(gpt(state_bytes))
        rows: Rows = {contender.name: defaultdict(Series) for contender in CONTENDERS}
        for contender in rotations(CONTENDERS, times=times):
            figures = _figures(training, contender, scratch / "history", steps=steps, every=every, batch=batch)
            for figure, value in figures.items():
                rows[contender.name][figure].add(value)
    finally:
        torch.set_num_threads(threads)
    for name, row in rows.items():
        for column, other in (("against none", NONE), ("against raw", RAW)):
            if name != NONE:
                pairs = zip(row["step"].values, rows[other]["step"].values, strict=True)
                row[column] = Series([step / base for step, base in pairs])
    settings = {"state_bytes": training.state_bytes(), "tokens": batch * 128, "steps": steps, "every": every}
    return rows, settings | {"rotations": times}


def _figures(
    training: Training, contender: Contender, root: Path, *, steps: int, every: int, batch: int
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    if not contender.captured:
        return {"step": _seconds(training, steps, batch, generator) / steps}
    session = capture.enable(
        training.model,
        optimizer=training.optimizer,
        every=every,
        history=root,
        stats_every=0,
        compact=contender.compact,
    )
    # The window is of a training that has begun before: the process that packs has been started.
    _seconds(training, 4 * every, batch, generator)
    before = session.stats
    figures = {"step": _seconds(training, steps, batch, generator) / steps}
    after = session.stats
    packed = after.compacted - before.compacted
    if contender.compact:
        figures["packed"] = packed
    if packed:
        raw = after.bytes / after.snapshots
        figures["of the raw"] = 1 - (after.saved_bytes - before.saved_bytes) / packed / raw
    session.close()
    shutil.rmtree(root)
    return figures


def _seconds(training: Training, count: int, batch: int, generator: torch.Generator) -> float:
    with clock() as window:
        for _ in range(count):
            tokens = torch.randint(0, 256, (batch, 129), generator=generator)
            training.optimizer.zero_grad()
            training.model(tokens[:, :-1], tokens[:, 1:]).backward()
            training.update()
    return window.seconds
