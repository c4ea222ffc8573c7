"""Reads the fingerprints of runs: what each rank had in memory after each step, in a few bytes for each tensor."""

import re
from collections.abc import Iterator
from pathlib import Path

from catalog.errors import HistoryError
from catalog.format.fingerprints import StepFingerprint, read_fingerprints
from catalog.format.segments import current_segments, segments
from catalog.paths import HistoryPaths

__all__ = ["fingerprinted_ranks", "fingerprints_of"]

_WRITER = re.compile(r"rank-([0-9]{5})")
_MAX_LISTINGS = 10
"""So often is a folder listed when files that it names are gone, because their writer merges them."""


def fingerprinted_ranks(paths: HistoryPaths, run: str) -> list[int]:
    """Return the ranks of a run that have left fingerprints, ascending."""
    folder = paths.fingerprints_dir(run)
    writers = {segment.writer for segment in current_segments(path.name for path in segments(folder))}
    return sorted(int(match[1]) for match in map(_WRITER.fullmatch, writers) if match)


def fingerprints_of(
    paths: HistoryPaths, run: str, rank: int, *, after: int = -1, until: int | None = None
) -> Iterator[StepFingerprint]:
    """Yield the fingerprints of one rank, ascending by step, of those steps with `after < step <= until`.

    One segment is in memory at a time. One that can't be read is left out: `verify` names it.
    """
    last = after
    for _ in range(_MAX_LISTINGS):
        try:
            for path in _segments_of(paths, run, rank):
                for found in _of_segment(path, run):
                    if until is not None and found.step > until:
                        return
                    if found.step > last and found.rank == rank:
                        last = found.step
                        yield found
        except FileNotFoundError:
            # Its writer has merged it: another one has its rows.
            continue
        return


def _segments_of(paths: HistoryPaths, run: str, rank: int) -> list[Path]:
    folder = paths.fingerprints_dir(run)
    current = current_segments(path.name for path in segments(folder))
    return [folder / segment.name for segment in current if segment.writer == f"rank-{rank:05d}"]


def _of_segment(path: Path, run: str) -> Iterator[StepFingerprint]:
    try:
        yield from read_fingerprints(path, run=run)
    except HistoryError:
        return
