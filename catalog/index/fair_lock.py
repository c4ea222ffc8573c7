"""Whose turn it is at the index file: many readers, or one writer, and neither starves.

Two lock files. `gate` is passed one at a time; `room` is held shared by readers, exclusively by a writer.

1. A reader passes the gate, enters the room shared, and frees the gate at once.
2. A writer takes the gate and keeps it, so that no further reader enters; waits until the room is empty; works; frees both.

Nobody waits longer than their patience. A process that dies frees its locks, since the kernel does so.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.disk.locks import free_lock, open_lock
from catalog.errors import SetupError

__all__ = ["IndexBusyError", "Turnstile"]

_POLL_S = 0.001


class IndexBusyError(SetupError):
    """It was not one's turn at the index within the patience given; never leaves this package."""


class Turnstile:
    """The two lock files of one history. Holds nothing between calls."""

    def __init__(self, *, gate: Path, room: Path) -> None:
        self._gate = gate
        self._room = room

    @contextmanager
    def reading(self, *, patience_s: float) -> Iterator[None]:
        """The body runs while no writer does. IndexBusyError after `patience_s`."""
        deadline = time.monotonic() + patience_s
        with _lock_file(self._room) as room:
            with _lock_file(self._gate) as gate:
                _take(gate, fcntl.LOCK_EX, deadline)
                _take(room, fcntl.LOCK_SH, deadline)
            yield

    @contextmanager
    def writing(self, *, patience_s: float) -> Iterator[None]:
        """The body runs alone. IndexBusyError after `patience_s`."""
        deadline = time.monotonic() + patience_s
        with _lock_file(self._gate) as gate, _lock_file(self._room) as room:
            _take(gate, fcntl.LOCK_EX, deadline)
            _take(room, fcntl.LOCK_EX, deadline)
            yield


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    """A descriptor of the lock file; what was locked through it is free afterwards."""
    try:
        handle = open_lock(path)
    except OSError as error:
        raise IndexBusyError(f"{path}: can't be opened for locking: {error.strerror}") from error
    try:
        yield handle
    finally:
        free_lock(handle)


def _take(handle: int, how: int, deadline: float) -> None:
    """flock has no time limit, so this asks again and again."""
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise IndexBusyError("the index is in use") from None
            time.sleep(_POLL_S)
