"""Finds the step that a reference means where it was not captured, but can be made again."""

from dataclasses import dataclass

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.read.redo import redo_base
from catalog.records import CheckpointRef
from catalog.references import generations

__all__ = ["RedoRef", "find_step"]


@dataclass(frozen=True, slots=True)
class RedoRef:
    """A step that was not captured, and the checkpoint from which it is made again."""

    ref: CheckpointRef
    base: CheckpointRef


def find_step(history: History, ref: int | str | CheckpointRef, *, run: str | None = None) -> CheckpointRef | RedoRef:
    """Return the checkpoint that `ref` names, as `History.resolve` does, or the step of a redo log. A negative number,
    a tag and a word always name a checkpoint. Errors are those of `History.resolve`.
    """
    try:
        return history.resolve(ref, run=run)
    except NotFoundError:
        found = _recorded(history, ref, run)
        if found is None:
            raise
        return found


def _recorded(history: History, ref: int | str | CheckpointRef, run: str | None) -> RedoRef | None:
    """Return the recorded step that `ref` names: in the run that it names, or in the lineage of `run`."""
    named, _, number = str(ref).rpartition(":")
    if not number.isdecimal():
        return None
    step = int(number)
    if named:
        runs: list[tuple[str, int | None]] = [(history.run_named(named), None)]
    else:
        runs = generations(history.paths, run or history.current_run())
    # A run has only the steps after its fork; those before are its parent's.
    within = (one for one, last in runs if last is None or step <= last)
    found = ((one, redo_base(history.paths, one, step)) for one in within)
    return next((RedoRef(CheckpointRef(one, step), base) for one, base in found if base is not None), None)
