"""The segments of redo logs as retention sees them: what each takes on the disk, what it needs, and its removal.

Each step of a segment is made again from the newest checkpoint before it. Segments that have no checkpoint before them
are of no use any more; under a byte budget those go too for which there is no room.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from catalog.disk.folders import open_folder, remove_files
from catalog.errors import NotFoundError
from catalog.format.journal import Journal
from catalog.format.redo_segment import RedoSegmentName, redo_segments
from catalog.paths import HistoryPaths
from catalog.read.pins import alone_with
from catalog.read.runs import steps
from catalog.records import CheckpointRef

__all__ = [
    "REDO_EVENT",
    "SegmentFacts",
    "bases_of",
    "remove_segments",
    "remove_useless_segments",
    "segment_bytes",
    "segment_facts",
]

REDO_EVENT = "redo_removed"
"""The event of the journal that tells why steps of a redo log are not there any more."""

_BLOCK_BYTES = 4096


def segment_bytes(size: int) -> int:
    """Return what a segment of `size` bytes counts for: whole blocks of the disk, and one for its name. It follows from
    the size alone, so that the rank that writes a segment and the one that removes it count the same."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES + _BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """One published segment of a run, with what it counts for."""

    run: str
    name: RedoSegmentName
    nbytes: int


def segment_facts(paths: HistoryPaths, run: str) -> list[SegmentFacts]:
    """Return the published segments of a run, ascending by rank and step; without those that are removed meanwhile."""
    found = []
    for name in redo_segments(paths, run):
        with suppress(FileNotFoundError):
            size = (paths.redo_dir(run) / name.name).lstat().st_size
            found.append(SegmentFacts(run, name, segment_bytes(size)))
    return found


def bases_of(name: RedoSegmentName, among: Sequence[int]) -> tuple[int, ...]:
    """Return those of some checkpoints, ascending, from which the steps of a segment are made again: the newest before
    its first step, and those within. None: no step of it can be made again."""
    before = [step for step in among if step < name.first]
    return (*before[-1:], *(step for step in among if name.first <= step < name.last))


def remove_segments(paths: HistoryPaths, segments: Sequence[SegmentFacts], reason: str, *, journal: Journal) -> int:
    """Remove segments of one run, the reason of which the journal has first; return what they counted for. Those that a
    reader may be reading are left: it has a checkpoint open from which their steps are made."""
    if not segments:
        return 0
    (run,) = {one.run for one in segments}
    first, last = min(one.name.first for one in segments), max(one.name.last for one in segments)
    journal.event(REDO_EVENT, first, reason=f"steps {first} to {last}: {reason}", last=last)
    journal.flush()
    there = steps(paths, run)
    by_bases: dict[tuple[int, ...], list[SegmentFacts]] = {}
    for one in segments:
        by_bases.setdefault(bases_of(one.name, there), []).append(one)
    freed = 0
    for bases, needing in by_bases.items():
        with ExitStack() as locks, suppress(NotFoundError):
            if all(locks.enter_context(alone_with(paths, CheckpointRef(run, base))) for base in bases):
                freed += _unlinked(paths, run, needing)
    return freed


def remove_useless_segments(paths: HistoryPaths, run: str) -> int:
    """Remove the segments of which no step can be made again, since no checkpoint is before it; return what they
    counted for."""
    there = steps(paths, run)
    useless = [one for one in segment_facts(paths, run) if not bases_of(one.name, there)]
    return _unlinked(paths, run, useless) if useless else 0


def _unlinked(paths: HistoryPaths, run: str, segments: Sequence[SegmentFacts]) -> int:
    before = {one.name for one in segment_facts(paths, run)}
    names = {one.name.name for one in segments}
    with suppress(OSError), open_folder(paths.redo_dir(run)) as folder:
        remove_files(folder, names.__contains__, only_temporaries=False)
    gone = before - {one.name for one in segment_facts(paths, run)}
    return sum(one.nbytes for one in segments if one.name in gone)
