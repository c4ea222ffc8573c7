"""Locks on files, held alone or shared, by a process as long as it lives: a process that dies frees its locks.

The locks are flock(2), which belongs to the open file and not to the process (as fcntl locks do): two threads of one
process exclude each other, and closing some other descriptor of the same file frees nothing. The price is that a forked
child shares the open file, and with it the lock. Therefore `free_lock` unlocks explicitly and does not just close, and
a child closes what it inherited; otherwise a worker of a data loader that outlives its training would keep the run
locked.
"""

import fcntl
import os
import time
from pathlib import Path

from catalog.disk.regular_file import open_descriptor

__all__ = ["free_lock", "is_locked", "open_lock", "share_lock", "take_lock", "try_lock"]

_PROBE_PATIENCE_S = 2.0
_POLL_S = 0.001

_open: set[int] = set()


def open_lock(path: Path, *, create: bool = True) -> int:
    """Open the lock file at `path`, and create it when it is missing, unless `create` is false: then raise
    FileNotFoundError. The caller closes it with `free_lock`. FormatError when it is no regular file."""
    descriptor = open_descriptor(path, os.O_RDWR | (os.O_CREAT if create else 0))
    _open.add(descriptor)
    return descriptor


def free_lock(descriptor: int) -> None:
    """Free the lock held through `descriptor`, in all processes that share it, and close the descriptor. Does nothing
    in a forked child, which closed it at the fork."""
    if descriptor in _open:
        _open.remove(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _close_inherited() -> None:
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_inherited)


def try_lock(path: Path, *, create: bool = True) -> int | None:
    """Return a descriptor that holds the lock until `free_lock`, or None when another process or thread holds it. The
    errors are those of `open_lock`."""
    descriptor = open_lock(path, create=create)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free_lock(descriptor)
        return None
    return descriptor


def take_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until `free_lock`, or until its process dies; None when another process
    or thread goes on holding it. Creates the file when it is missing."""
    # `is_locked` itself holds the lock for an instant, so one refusal does not mean that somebody writes there.
    deadline = time.monotonic() + _PROBE_PATIENCE_S
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)
    return descriptor


def share_lock(path: Path) -> int | None:
    """Return a descriptor that shares the lock with others until `free_lock`, or until its process dies; None when a
    process or thread goes on holding it alone. The file is only read. The errors are those of `open_lock`."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    _open.add(descriptor)
    deadline = time.monotonic() + _PROBE_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                free_lock(descriptor)
                return None
            time.sleep(_POLL_S)
        except BaseException:
            free_lock(descriptor)
            raise


def is_locked(path: Path) -> bool:
    """Return whether anybody holds the lock file at `path`, as far as this host can see. FileNotFoundError when there
    is no such file, FormatError when it is no regular file."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
