"""Finds what the index has registered and the folders no longer have: checkpoints that vanished without a word.

A checkpoint exists exactly when its marker does, so one whose marker is lost looks like one that was never committed.
The index remembers it. Who removes a checkpoint on purpose removes the folder of its step, or of its run, and then
nothing is missing; a folder that is still there without its marker, or its run.json, has lost it.
"""

from dataclasses import dataclass
from pathlib import Path

from catalog.disk.regular_file import is_real_folder
from catalog.errors import FormatError
from catalog.format.segments import parse_segment, segments
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
        registered = ingested.steps.get(run, frozenset())
        if not paths.run_json(run).exists() and is_real_folder(paths.run_dir(run)):
            message = f"registered with {len(registered)} checkpoints, but it is gone: {_FORGET}"
            found.append(Gone(run, None, paths.run_json(run), message))
        suspected = (frozenset(step_dirs(paths, run)) & registered).difference(steps(paths, run))
        for step in sorted(suspected):
            # Whoever removes a checkpoint takes its folder away in one instant: one that is still there has lost it.
            if is_real_folder(paths.step_dir(run, step)):
                found.append(Gone(run, step, paths.marker(run, step), f"registered, but its marker is gone: {_FORGET}"))
        found += _gone_segments(paths, run, ingested.segments.get(run, frozenset()))
    return found


def registered_steps(paths: HistoryPaths, run: str) -> frozenset[int]:
    """Return the steps of a run that the index has registered as committed; nothing when it can't be read."""
    return _ingested(paths).steps.get(run, frozenset())


def _gone_segments(paths: HistoryPaths, run: str, registered: frozenset[str]) -> list[Gone]:
    folder = paths.journal_dir(run)
    names = {path.name for path in segments(folder)}
    there = [segment for segment in map(parse_segment, names) if segment is not None]
    lost = []
    for name in sorted(registered - names):
        segment = parse_segment(name)
        if segment is not None and not any(other.replaces(segment) for other in there):
            lost.append(Gone(run, None, folder / name, f"registered, but it is gone: {_FORGET}"))
    return lost


def _ingested(paths: HistoryPaths) -> Ingested:
    try:
        with database(paths).reading(patience_s=_PATIENCE_S) as connection:
            return ingested_in(connection) if is_current(connection, paths) else Ingested()
    except (IndexBusyError, FormatError):
        return Ingested()
