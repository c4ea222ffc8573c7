"""Opens the files of a history, which must be regular files, and lists its folders, which must be real ones.

A history may come from somebody else. Opening a FIFO would wait for a writer for ever, a device node may do anything,
and a symbolic link leads out of the history. So whatever reads a file of a history opens it here, and gets an error
that names it instead. Only the folder of the history itself may be reached through symbolic links.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from catalog.errors import FormatError

__all__ = [
    "check_folders",
    "is_real_folder",
    "open_descriptor",
    "open_regular",
    "read_at_most",
    "read_range",
    "what_it_is",
]

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device node"),
    (stat.S_ISBLK, "a device node"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a history for reading. FormatError when it is no regular file, OSError when it can't be opened
    (FileNotFoundError when there is none)."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def open_descriptor(path: Path, flags: int) -> int:
    """Open a regular file with the flags of open(2) and return its descriptor; a new file gets the usual rights.
    FormatError when it is something else; this never waits for another process."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # ELOOP is a symbolic link, ENXIO a socket or a FIFO that nobody reads, EISDIR a folder.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _refused(path, os.lstat(path).st_mode) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(path, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_at_most(path: Path, limit: int) -> bytes:
    """Return all bytes of a file of a history. FormatError when it has more than `limit` bytes, or grows while it is
    read; other errors are those of `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FormatError(f"{path}: {size} bytes, where {limit} are allowed: restore the file from a copy")
        # A read first takes memory for all that it may return, so it may return hardly more than there is.
        data = file.read(size + 1)
    if len(data) > size:
        raise FormatError(f"{path}: grew while it was read, as no file of a history does: try again")
    return data


def read_range(descriptor: int, offset: int, nbytes: int) -> bytes:
    """Return so many bytes of an open file from `offset` on, from any thread; fewer where the file ends before."""
    parts = []
    while nbytes and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_real_folder(path: Path) -> bool:
    """Return whether there is a folder at `path` itself, not behind a symbolic link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_folders(path: Path, *, root: Path) -> None:
    """Raise FormatError unless everything between `root` and `path`, and `path` itself, is a real folder, as far as it
    exists."""
    for folder in [path, *path.parents][: len(path.parts) - len(root.parts)]:
        try:
            mode = os.lstat(folder).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISDIR(mode):
            raise FormatError(f"{folder}: is {what_it_is(mode)} where a history has a folder: remove it")


def what_it_is(mode: int) -> str:
    """Return in words what a `st_mode` stands for."""
    return next((words for matches, words in _KINDS if matches(mode)), "a regular file")


def _refused(path: Path, mode: int) -> FormatError:
    return FormatError(
        f"{path}: is {what_it_is(mode)} where a history has a regular file: it is not opened; put the file itself there"
    )
