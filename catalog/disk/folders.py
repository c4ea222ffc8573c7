"""Removes files of a history through the folder that holds them, which is opened without following symbolic links.

A history may contain anything, since people copy, link and mount. Only regular files whose names the caller knows are
removed, and temporary files for such names; everything else stays.
"""

import os
import stat
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


def remove_files(folder: int, is_known: Callable[[str], bool], *, only_temporaries: bool) -> list[str]:
    """Remove the regular files with a known name, or with a temporary name for one; return the names of the others.
    What is removed stays removed after a power cut."""
    others = []
    removed = False
    for name in os.listdir(folder):
        final = final_name(name)
        ours = is_known(final) if final is not None else is_known(name) and not only_temporaries
        if ours and stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            removed = True
        else:
            others.append(name)
    if removed:
        os.fsync(folder)
    return others
