"""The checkpoints that a user names by a list of references, by "last N", or not at all: then all of a run."""

import re
from collections.abc import Iterable
from typing import Final

from capture.redo.steps import RedoRef, find_step
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.options import Steps

__all__ = ["chosen_steps"]

_LAST: Final = re.compile(r"last\s+([0-9]+)")


def chosen_steps(
    history: History, steps: Steps | None, *, run: str | None, verb: str, redo: bool = False
) -> list[CheckpointRef]:
    """Return the checkpoints in the order given, as a list or as text, "10, 20"; None names all of the run and its
    parents, "last N" their last N. With `redo` a list may name steps of a redo log too.

    NotFoundError, with the nearest, for a step that is not there; SetupError for none at all, for one that is named
    twice, and for what is no reference.
    """
    last = _LAST.fullmatch(steps) if isinstance(steps, str) else None
    if steps is None or last is not None:
        refs = committed_lineage(history.paths, run)
        count = len(refs) if last is None else int(last[1])
        if not 0 < count <= len(refs):
            raise NotFoundError(f"{verb}: steps={steps!r}: {refs[0]} to {refs[-1]} are {len(refs)} checkpoints")
        return refs[-count:]
    if isinstance(steps, str):
        steps = [part.strip() for part in steps.split(",")]
    several = steps if isinstance(steps, Iterable) else [steps]
    found = [find_step(history, step, run=run) if redo else history.resolve(step, run=run) for step in several]
    refs = [step.ref if isinstance(step, RedoRef) else step for step in found]
    if not refs:
        raise SetupError(f"{verb}: steps={steps!r} names no checkpoint: give a list of steps, or 'last 10'")
    twice = next((ref for at, ref in enumerate(refs) if ref in refs[:at]), None)
    if twice is not None:
        raise SetupError(f"{verb}: checkpoint {twice} is named twice: name each once, and give it more weight instead")
    return refs
