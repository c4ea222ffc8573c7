"""Exclusive locks on files, held by a process as long as it lives: a process that dies frees its locks.

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

from catalog.errors import SetupError

__all__ = ["free_lock", "is_locked", "open_lock", "take_lock", "try_lock"]

_PROBE_PATIENCE_S = 2.0
_POLL_S = 0.001

_open: set[int] = set()


def open_lock(path: Path) -> int:
    """Open the lock file at `path`, creating it when it is missing. The caller closes it with `free_lock`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until `free_lock`, or None when another process or thread holds it."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free_lock(descriptor)
        return None
    return descriptor


def take_lock(path: Path) -> int:
    """Return a descriptor that holds the lock until `free_lock`, or until its process dies. SetupError when another
    process holds it."""
    # `is_locked` itself holds the lock for an instant, so one refusal does not mean that somebody writes there.
    deadline = time.monotonic() + _PROBE_PATIENCE_S
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise SetupError(f"{path}: another live process writes this rank of the run")
        time.sleep(_POLL_S)
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether anybody holds the lock file at `path`. FileNotFoundError when there is no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
