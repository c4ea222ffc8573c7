"""The data files that a checkpoint needs, its own and those that it refers to, and whether they are there.

Only names and sizes are looked at, and the tables of packed images, so it takes no time to find out that bytes are
gone; whether they are the right ones is what `catalog.verify` says.
"""

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from catalog.data_files.data_files import image_of, only_packed
from catalog.errors import HistoryError
from catalog.paths import HistoryPaths, packed_file, parse_data_file

__all__ = ["NeededFile", "bases_of", "missing_file"]


class NeededFile(NamedTuple):
    """A data file, relative to the history, and the number of bytes that it must have at least."""

    file: str
    nbytes: int


def missing_file(paths: HistoryPaths, needed: Iterable[NeededFile]) -> str:
    """Return what is needed and is not there, as "needs runs/.../rank-00000.safetensors (step 20), which is gone"; ""
    when all is there, as far as names and sizes tell."""
    for file, nbytes in needed:
        problem = _problem(paths, file, nbytes)
        if problem:
            return _needs(file, problem)
        try:
            bases = bases_of(paths, file)
        except (HistoryError, OSError) as error:
            return _needs(file, f"whose packed image can't be read: {error}")
        for base in bases:
            problem = _problem(paths, base, 0)
            if problem:
                return f"{_needs(base, problem)}: {packed_file(file)} was packed against it"
    return ""


def bases_of(paths: HistoryPaths, file: str) -> tuple[str, ...]:
    """Return the data files without which the bytes of this one can't be made: none, unless it is packed against them.
    HistoryError or OSError where its image can't be read, so that nobody knows."""
    return image_of(paths.root, file).bases if only_packed(paths.root, [file]) else ()


def _problem(paths: HistoryPaths, file: str, nbytes: int) -> str:
    """Return what is wrong with a data file, or with its packed image where that stands for it."""
    try:
        # Not a Path: to make one takes longer than the look.
        facts = os.lstat(f"{paths.root}/{file}")
    except (FileNotFoundError, NotADirectoryError):
        return _image_problem(paths, file, nbytes)
    if not stat.S_ISREG(facts.st_mode):
        return "which is no regular file"
    return f"which has {facts.st_size} of {nbytes} bytes" if facts.st_size < nbytes else ""


def _image_problem(paths: HistoryPaths, file: str, nbytes: int) -> str:
    try:
        found = image_of(paths.root, file).data_bytes
    except (FileNotFoundError, NotADirectoryError):
        return "which is gone"
    except (HistoryError, OSError) as error:
        return f"whose packed image can't be read: {error}"
    return f"whose packed image has {found} of {nbytes} bytes" if found < nbytes else ""


def _needs(file: str, problem: str) -> str:
    place = parse_data_file(file)
    step = "" if place is None else f" (step {place[1]})"
    return f"needs {file}{step}, {problem}"
