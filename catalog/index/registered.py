"""Finds what the index has registered and the folders no longer have: checkpoints that vanished without a word.

A checkpoint exists exactly when its marker does, so one whose marker is lost looks like one that was never committed.
The index remembers it. Who removes a checkpoint on purpose removes the folder of its step, or of its run, and then
nothing is missing; a folder that is still there without its marker, or its run.json, has lost it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.disk.regular_file import is_real_folder
from catalog.errors import FormatError
from catalog.format.segments import listings, parse_segment
from catalog.index.database import database
from catalog.index.fair_lock import IndexBusyError
from catalog.index.index_file import ingested_in, is_current
from catalog.index.unindexed import Ingested
from catalog.paths import HistoryPaths
from catalog.read.runs import step_dirs, steps

__all__ = ["Gone", "gone", "registered_steps"]

_PATIENCE_S = 2.0
_FORGET = "put it back from a copy, or, if it was removed on purpose, let `dshistory reindex` forget it"


@dataclass(frozen=True, slots=True)
class Gone:
    """A file that is gone: of a registered checkpoint, or of a whole run (`step` is None)."""

    run: str
    step: int | None
    path: Path
    message: str


def gone(paths: HistoryPaths) -> list[Gone]:
    """Return the markers, run.json files and journal segments that are gone, by run; nothing when the index can't be
    read."""
    found = []
    ingested = _ingested(paths)
    for run in sorted(ingested.runs):
        steps_of_run = ingested.steps.get(run, frozenset())
        lost = _gone_steps(paths, run, steps_of_run) + _gone_segments(
            paths, run, ingested.segments.get(run, frozenset())
        )
        if not paths.run_json(run).exists():
            message = f"registered with {len(steps_of_run)} checkpoints, but it is gone: {_FORGET}"
            lost.insert(0, Gone(run, None, paths.run_json(run), message))
        if lost and is_real_folder(paths.run_dir(run)):
            found += lost
    return found


def registered_steps(paths: HistoryPaths, run: str) -> frozenset[int]:
    """Return the steps of a run that the index has registered as committed; nothing when it can't be read."""
    return _ingested(paths).steps.get(run, frozenset())


def _gone_steps(paths: HistoryPaths, run: str, registered: frozenset[int]) -> list[Gone]:
    suspected = (frozenset(step_dirs(paths, run)) & registered).difference(steps(paths, run))
    message = f"registered, but its marker is gone: {_FORGET}"
    # Whoever removes a checkpoint takes its folder away in one instant: one that is still there has lost its marker.
    return [
        Gone(run, step, paths.marker(run, step), message)
        for step in sorted(suspected)
        if is_real_folder(paths.step_dir(run, step))
    ]


def _gone_segments(paths: HistoryPaths, run: str, registered: frozenset[str]) -> list[Gone]:
    folder = paths.journal_dir(run)
    lost: list[str] | None = None
    for names in listings(folder):
        before, lost = lost, _unreplaced(names, registered)
        if not lost or lost == before:
            break
    return [Gone(run, None, folder / name, f"registered, but it is gone: {_FORGET}") for name in lost or ()]


def _unreplaced(names: Sequence[str], registered: frozenset[str]) -> list[str]:
    """Return the registered segments that are not among those there, and that none of these replaces, sorted."""
    there = list(filter(None, map(parse_segment, names)))
    return [
        name
        for name in sorted(registered.difference(names))
        if (segment := parse_segment(name)) is not None and not any(other.replaces(segment) for other in there)
    ]


def _ingested(paths: HistoryPaths) -> Ingested:
    try:
        with database(paths).reading(patience_s=_PATIENCE_S) as connection:
            return ingested_in(connection) if is_current(connection, paths) else Ingested()
    except (IndexBusyError, FormatError):
        return Ingested()
