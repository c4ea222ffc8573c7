"""Reads the fingerprints of runs: what each rank had in memory after each step, in a few bytes for each tensor."""

import re
from collections.abc import Iterator
from pathlib import Path

from catalog.errors import HistoryError
from catalog.format.fingerprints import StepFingerprint, read_fingerprints
from catalog.format.segments import current_segments, listings, segments
from catalog.paths import HistoryPaths

__all__ = ["fingerprinted_ranks", "fingerprints_of"]

_WRITER = re.compile(r"rank-([0-9]{5})")


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
    folder, writer = paths.fingerprints_dir(run), f"rank-{rank:05d}"
    for names in listings(folder):
        try:
            for segment in current_segments(names):
                for found in _of_segment(folder / segment.name, run) if segment.writer == writer else ():
                    if until is not None and found.step > until:
                        return
                    if found.step > last and found.rank == rank:
                        last = found.step
                        yield found
        except FileNotFoundError:
            continue
        return


def _of_segment(path: Path, run: str) -> Iterator[StepFingerprint]:
    try:
        yield from read_fingerprints(path, run=run)
    except HistoryError:
        return
