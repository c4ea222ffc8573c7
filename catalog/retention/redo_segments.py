"""The segments of redo logs as retention sees them: what each takes on the disk, what it needs, and its removal.

Each step of a segment is made again from the newest checkpoint before it. Segments that have no checkpoint before them
are of no use any more; under a byte budget those go too for which there is no room. Segments of one rank that have a
step in common stay or go together, since one says which steps of another do not count any more.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from catalog.access.pins import alone_with
from catalog.disk.folders import open_folder, remove_files
from catalog.errors import NotFoundError
from catalog.format.journal import Journal
from catalog.format.redo_segment import RedoSegmentName, redo_segments
from catalog.paths import HistoryPaths
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
    "together",
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
    """One published segment of a run, with what it counts for, and when it was written, in nanoseconds."""

    run: str
    name: RedoSegmentName
    nbytes: int
    written_ns: int = 0


def segment_facts(paths: HistoryPaths, run: str) -> list[SegmentFacts]:
    """Return the published segments of a run, ascending by rank and step; without those that are removed meanwhile."""
    found = []
    for name in redo_segments(paths, run):
        with suppress(FileNotFoundError):
            file = (paths.redo_dir(run) / name.name).lstat()
            found.append(SegmentFacts(run, name, segment_bytes(file.st_size), file.st_mtime_ns))
    return found


def together(segments: Iterable[SegmentFacts]) -> list[list[SegmentFacts]]:
    """Return the segments in groups that stay or go as one: those of a rank that are linked by steps in common."""
    groups: list[list[SegmentFacts]] = []
    of_rank, last = None, -1
    for one in sorted(segments, key=lambda one: (one.run, one.name)):
        if of_rank == (one.run, one.name.rank) and one.name.first <= last:
            groups[-1].append(one)
            last = max(last, one.name.last)
        else:
            groups.append([one])
            of_rank, last = (one.run, one.name.rank), one.name.last
    return groups


def bases_of(group: Iterable[SegmentFacts], among: Sequence[int]) -> tuple[int, ...]:
    """Return those of some checkpoints, ascending, from which the steps of segments are made again: the newest before
    the first step of each, and those within. None: no step of them can be made again."""
    found: set[int] = set()
    for name in (one.name for one in group):
        before = [step for step in among if step < name.first]
        found.update(before[-1:], (step for step in among if name.first <= step < name.last))
    return tuple(sorted(found))


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
    going = {one.name for one in segments}
    by_bases: dict[tuple[int, ...], list[SegmentFacts]] = {}
    for group in together(segment_facts(paths, run)):
        if all(one.name in going for one in group):
            by_bases.setdefault(bases_of(group, there), []).extend(group)
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
    useless = [one for group in together(segment_facts(paths, run)) if not bases_of(group, there) for one in group]
    return _unlinked(paths, run, useless) if useless else 0


def _unlinked(paths: HistoryPaths, run: str, segments: Sequence[SegmentFacts]) -> int:
    before = {one.name for one in segment_facts(paths, run)}
    with suppress(OSError), open_folder(paths.redo_dir(run)) as folder:
        for names in _in_order(segments):
            remove_files(folder, names.__contains__, only_temporaries=False)
    gone = before - {one.name for one in segment_facts(paths, run)}
    return sum(one.nbytes for one in segments if one.name in gone)


def _in_order(segments: Sequence[SegmentFacts]) -> list[set[str]]:
    """Return the names of segments in the order of their removal: in a group what was written first goes first, since
    what was written later says which steps of it do not count. So it may end anywhere."""
    rounds: list[set[str]] = []
    for group in together(segments):
        for place, one in enumerate(sorted(group, key=lambda one: one.written_ns)):
            if place == len(rounds):
                rounds.append(set())
            rounds[place].add(one.name.name)
    return rounds
