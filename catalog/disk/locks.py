"""Locks on files, and who lives: each rank of a run holds flock on a file of its own as long as it may write there.

A lock belongs to the open file, which a forked child shares: so a lock is freed by name, not just closed, and a child
closes what it inherited; else a worker of a data loader that outlives its training would keep the run alive.
"""

import fcntl
import os
import time
from pathlib import Path

from catalog.errors import SetupError
from catalog.paths import HistoryPaths

__all__ = ["free_lock", "open_lock", "run_is_held", "take_lock", "try_lock"]

_PROBE_PATIENCE_S = 2.0
_POLL_S = 0.001


_open: set[int] = set()


def open_lock(path: Path) -> int:
    """A descriptor of the lock file at `path`, made when there is none; for `free_lock`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _open.add(descriptor)
    return descriptor


def free_lock(descriptor: int) -> None:
    """Free what is locked through the descriptor, whoever shares it, and close it."""
    if descriptor in _open:
        _open.remove(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _close_inherited() -> None:
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_inherited)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock until `free_lock`, or None when another has it."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free_lock(descriptor)
        return None
    return descriptor


def take_lock(path: Path) -> int:
    """A descriptor that holds the lock until `free_lock`, or until its process dies. SetupError when another has it.

    A reader that asks whether the lock is held has it for an instant, so this tries for a moment."""
    deadline = time.monotonic() + _PROBE_PATIENCE_S
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise SetupError(f"{path}: another live process writes this rank of the run")
        time.sleep(_POLL_S)
    return descriptor


def run_is_held(paths: HistoryPaths, run: str) -> bool:
    """Whether any live process writes this run."""
    try:
        names = os.listdir(paths.locks_dir(run))
    except FileNotFoundError:
        return False
    return any(_is_locked(paths.locks_dir(run) / name) for name in names)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
