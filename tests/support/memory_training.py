"""Trainings that measure what a capture adds to their memory, as a script.

    python memory_training.py CASE HISTORY

It prints figures as JSON. `added` is the highest resident memory of the process while it captured, less the highest one
of the same training before, in bytes, and `left` what it has after the capture beyond that; everything that a capture
imports is imported by then. What allocators keep for later, some 20 MiB of chance, is given back before `left` counts.
"""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import torch

import capture
import catalog.index.index  # noqa: F401 - what it imports is no memory of a capture

MIB = 1 << 20
BUDGET = 16 * MIB


def memory(figure: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(figure))


def resident() -> int:
    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return memory("VmRSS")


def measured(step: Callable[[], object], steps: int, model: torch.nn.Module, **training: Any) -> dict[str, int]:
    """Train before the capture and with it."""
    duckdb.connect(":memory:").execute("SELECT 1").fetchall()
    for _ in range(2):
        step()
    gc.collect()
    # Linux: the highest resident memory is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    step()
    before = memory("VmHWM")
    session = capture.enable(model, history=sys.argv[2], every=1, budget_bytes=BUDGET, **training)
    for _ in range(steps):
        step()
    session.wait()
    # Statistics are computed until then.
    session.close()
    added = memory("VmHWM") - before
    return {"added": added, "left": resident() - before, "snapshots": session.stats.snapshots}


def filled(model: torch.nn.Module) -> torch.nn.Module:
    """Give every parameter a gradient that stays."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    return model


def layers(mib: int) -> torch.nn.Module:
    """Return four layers of `mib` MiB in all."""
    width = int((mib * MIB // 16) ** 0.5)
    return filled(torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4))))


def forward(model: torch.nn.Sequential) -> None:
    model(torch.ones(1, model[0].in_features))


def small() -> dict[str, int]:
    """20,000 tensors of a few bytes, with those of the optimizer."""
    model = torch.nn.Module()
    model.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(16)) for _ in range(5000))
    optimizer = torch.optim.AdamW(filled(model).parameters(), foreach=True)
    return {**measured(optimizer.step, 3, model, optimizer=optimizer), "tensors": 20_000}


def average() -> dict[str, int]:
    """An average of 192 MiB beside a small model."""
    model = layers(4)
    optimizer = torch.optim.SGD(model.parameters())
    values = {f"{i}": torch.ones(6 * MIB) for i in range(8)}

    def step() -> None:
        forward(model)
        optimizer.step()
        for value in values.values():
            value.mul_(0.999)

    return measured(step, 2, model, optimizer=optimizer, providers=[capture.Stateful("average", values)], stats_every=0)


def warm_up() -> dict[str, int]:
    """Weights of 192 MiB that stay as they are until the rate is not 0 any more."""
    model = layers(192)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda moves: float(moves > 8))

    def step() -> None:
        forward(model)
        optimizer.step()
        scheduler.step()
        # The statistics of what is unchanged must be learned before the rate moves.
        time.sleep(0.05)

    return measured(step, 8, model, optimizer=optimizer, scheduler=scheduler, stats_every=0)


def let_go() -> dict[str, int]:
    """Weights and momentum of 128 MiB each, which the training then lets go."""
    model = layers(128)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.step()
    session = capture.enable(
        model, optimizer=optimizer, history=sys.argv[2], every=2, budget_bytes=BUDGET, stats_every=0
    )
    for _ in range(3):
        optimizer.step()
    session.wait()
    before = resident()
    optimizer.state.clear()
    for parameter in model.parameters():
        parameter.grad = None
        parameter.data = torch.empty(0)
    return {"freed": before - resident()}


def many() -> dict[str, int]:
    """A tiny model with many checkpoints: what is allocated after some of them, and after some more."""
    model = filled(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    session = capture.enable(model, optimizer=optimizer, history=sys.argv[2], every=1, budget_bytes=BUDGET)

    def allocated(steps: Iterable[int]) -> int:
        for _ in steps:
            optimizer.step()
            session.wait()
        session._committer.wait_below(1)
        gc.collect()
        return pyarrow.total_allocated_bytes()

    # The first ones fill what is kept of the last manifests, up to 4 MiB.
    first, second = allocated(range(270)), allocated(range(30))
    session.close()
    return {"grown": (second - first) // 30}


CASES: Mapping[str, Callable[[], dict[str, int]]] = {
    "small": small,
    "average": average,
    "warm_up": warm_up,
    "let_go": let_go,
    "many": many,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CASES[sys.argv[1]]()))
