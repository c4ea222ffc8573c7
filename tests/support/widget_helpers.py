"""Histories with statistics, and the messages that a browser would send to the widget."""

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
"""The step that has no statistics."""


def layered_history(root: Path, *, silent: Sequence[int] = (SILENT,), names: Sequence[str] = ()) -> Explorer:
    """Return an explorer of two layers and a head over six checkpoints.

    At JUMP the weight `h.1.mlp.weight` changes a hundred times more than all others.
    """
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


def second_run(explorer: Explorer) -> None:
    """Add the run `again` to a `layered_history`: a replay of step 30 that was changed and goes another way."""
    facts = {"number": 2, "replay": {"id": "x", "of": "run-a:30", "until": 50, "change": {"lr_scale": 0.5}}}
    run = Run(explorer.root, "again", parent=("run-a", 30), facts=facts)
    for step in (30, 40, 50):
        weights = explorer.restore(step)["model"]
        for name in weights if step > 30 else ():
            if name == "h.0.mlp.weight" or step == 50:
                weights[name] = weights[name] + 0.1
        run.checkpoint(step, whole(weights), **({} if step == 30 else {"loss": 3.0 - step / 40, "lr": 5e-4}))
    run.close()
    explorer.analyze(quiet=True)


def trace(exploration: Any, name: str) -> Any:
    return next(trace for trace in exploration.figure.data if trace.name == name)


def cells(exploration: Any) -> dict[tuple[str, int], float | None]:
    """Return the values of the heat map by label and step."""
    heat = trace(exploration, "heat")
    return {
        (y, x): value
        for y, line in zip(heat.y, heat.customdata, strict=True)
        for x, value in zip(heat.x, line, strict=True)
    }


def titles(exploration: Any) -> dict[str, str]:
    """Return the titles of the panels that are shown."""
    return {note.name: note.text for note in exploration.figure.layout.annotations if note.visible}


def click(exploration: Any, label: str | None, step: int, *, of: str = "heat") -> None:
    """Send the message of a click on a cell of the heat map, or on a mark of another trace."""
    place = [trace.name for trace in exploration.figure.data].index(of)
    points = {"xs": [step], "ys": [label], "trace_indexes": [place], "point_indexes": [[0, 0]]}
    exploration.figure._js2py_pointsCallback = {"event_type": "plotly_click", "points": points}


def piece(exploration: Any, name: str) -> Any:
    """Return the widget with the class `dsh-NAME`."""
    (found,) = [widget for widget in widgets(exploration) if f"dsh-{name}" in getattr(widget, "_dom_classes", ())]
    return found


def widgets(exploration: Any) -> list[Any]:
    found, todo = [], [exploration.widget]
    while todo:
        found.append(todo.pop())
        todo += getattr(found[-1], "children", ())
    return found


def when(widget: Any, trait: str, holds: Callable[[], bool]) -> Event:
    """Return an event that is set once `holds` returns true; it is checked whenever the trait changes."""
    event = Event()

    def look(_: Any = None) -> None:
        if holds():
            event.set()

    widget.observe(look, trait)
    look()
    return event


def ref(step: int) -> CheckpointRef:
    return CheckpointRef("run-a", step)
