"""Removes files of a history through the folder that holds them, which is opened without following symbolic links.

A history may contain anything, since people copy, link and mount. Only regular files whose names the caller knows are
removed, and temporary files for such names; everything else stays.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from catalog.disk.durable import final_name

__all__ = ["open_folder", "remove_files"]


@contextmanager
def open_folder(path: os.PathLike[str] | str, parent: int | None = None) -> Iterator[int]:
    """Open a folder, in `parent` if that is given; OSError when it is none, or a symbolic link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_files(
    folder: int, is_known: Callable[[str], bool], *, only_temporaries: bool, min_age_s: float = 0.0
) -> list[str]:
    """Remove the regular files with a known name, or with a temporary name for one, that were last written at least
    `min_age_s` seconds ago; return the names of the others. What is removed stays removed after a power cut."""
    others = []
    removed = False
    for name in os.listdir(folder):
        final = final_name(name)
        ours = is_known(final) if final is not None else is_known(name) and not only_temporaries
        try:
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            # The clock of a file server may be ahead of this one: where the age does not matter it isn't asked for.
            is_old = not min_age_s or time.time() - facts.st_mtime >= min_age_s
            if ours and is_old and stat.S_ISREG(facts.st_mode):
                os.unlink(name, dir_fd=folder)
                removed = True
            else:
                others.append(name)
        except FileNotFoundError:
            # Whoever wrote it has given it its final name, or has removed it.
            continue
    if removed:
        os.fsync(folder)
    return others
