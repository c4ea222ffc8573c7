"""The data files that a checkpoint needs, its own and those that it refers to, and whether they are there.

Only names and sizes are looked at, so it takes no time to find out that bytes are gone; whether they are the right ones
is what `catalog.verify` says.
"""

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from catalog.paths import HistoryPaths, parse_data_file

__all__ = ["NeededFile", "missing_file"]


class NeededFile(NamedTuple):
    """A data file, relative to the history, and the number of bytes that it must have at least."""

    file: str
    nbytes: int


def missing_file(paths: HistoryPaths, needed: Iterable[NeededFile]) -> str:
    """Return what is needed and is not there, as "needs runs/.../rank-00000.safetensors (step 20), which is gone"; ""
    when all is there, as far as names and sizes tell."""
    for file, nbytes in needed:
        try:
            facts = os.lstat(paths.root / file)
        except (FileNotFoundError, NotADirectoryError):
            return _needs(file, "which is gone")
        if not stat.S_ISREG(facts.st_mode):
            return _needs(file, "which is no regular file")
        if facts.st_size < nbytes:
            return _needs(file, f"which has {facts.st_size} of {nbytes} bytes")
    return ""


def _needs(file: str, problem: str) -> str:
    place = parse_data_file(file)
    step = "" if place is None else f" (step {place[1]})"
    return f"needs {file}{step}, {problem}"
