"""Histories with statistics to look into, and what a browser would do to the widget."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
from explorer_helpers import Run, whole

from catalog.records import CheckpointRef
from dshistory.explorer import Explorer

STEPS = (0, 10, 20, 30, 40, 50)
JUMP = 40
SILENT = 20
"""The step without statistics."""


def layered_history(root: Path, *, silent: Sequence[int] = (SILENT,), names: Sequence[str] = ()) -> Explorer:
    """Two layers and a head over six checkpoints; at JUMP the weight `h.1.mlp.weight` moves a hundred times more than else."""
    run = Run(root)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(16, 32, generator=generator)
        for name in (*names, "h.0.mlp.weight", "h.0.mlp.bias", "h.1.mlp.weight", "h.1.attn.weight", "head.weight")
    }
    for step in STEPS:
        for name in weights:
            scale = 0.1 if (step, name) == (JUMP, "h.1.mlp.weight") else 1e-3
            weights[name] = weights[name] + scale * torch.randn(16, 32, generator=generator)
        moments = {name: tensor * 0.1 for name, tensor in weights.items()}
        run.checkpoint(step, [*whole(weights), *whole(moments, kind="exp_avg")], loss=3.0 - step / 50, lr=1e-3)
        run.metrics(step + 5, loss=2.9 - step / 50)
    run.close()
    explorer = Explorer.open(root)
    for step in STEPS:
        if step not in silent:
            explorer.analyze(step, quiet=True)
    return explorer


def trace(exploration: Any, name: str) -> Any:
    return next(trace for trace in exploration.figure.data if trace.name == name)


def cells(exploration: Any) -> dict[tuple[str, int], float | None]:
    """The values of the heat map by label and step."""
    heat = trace(exploration, "heat")
    return {
        (y, x): value
        for y, line in zip(heat.y, heat.customdata, strict=True)
        for x, value in zip(heat.x, line, strict=True)
    }


def click(exploration: Any, label: str, step: int) -> None:
    """What the page sends when a cell of the heat map is clicked."""
    place = [trace.name for trace in exploration.figure.data].index("heat")
    points = {"xs": [step], "ys": [label], "trace_indexes": [place], "point_indexes": [[0, 0]]}
    exploration.figure._js2py_pointsCallback = {"event_type": "plotly_click", "points": points}


def piece(exploration: Any, name: str) -> Any:
    """The widget with the class `dsh-NAME`."""
    (found,) = [widget for widget in widgets(exploration) if f"dsh-{name}" in getattr(widget, "_dom_classes", ())]
    return found


def widgets(exploration: Any) -> list[Any]:
    found, todo = [], [exploration.widget]
    while todo:
        found.append(todo.pop())
        todo += getattr(found[-1], "children", ())
    return found


def when(widget: Any, trait: str, holds: Callable[[], bool]) -> Event:
    """An event that is set as soon as something holds, looked at whenever the trait changes."""
    event = Event()

    def look(_: Any = None) -> None:
        if holds():
            event.set()

    widget.observe(look, trait)
    look()
    return event


def ref(step: int) -> CheckpointRef:
    return CheckpointRef("run-a", step)
