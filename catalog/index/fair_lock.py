"""A fair reader-writer lock between processes: many readers or one writer at the index file, and neither side starves.

One lock file is not enough. With flock alone, readers that overlap keep the file locked for ever, and a writer never
finds it free. So there are two:

- The queue lock decides who is next. Only one process holds it at a time.
- The access lock is held shared by readers and exclusively by a writer, while they use the index.

1. A reader takes the queue lock, takes the access lock shared, and frees the queue lock at once.
2. A writer takes the queue lock and keeps it, so that no further reader can reach the access lock; waits for the access
   lock, which becomes free when the readers inside have finished; works; frees both.

A writer does not starve, since readers that come later wait behind it in the queue. Readers do not starve either: a
writer holds the queue lock no longer than its own work, and then competes for it like everybody else.

The locks are flock(2), not fcntl(2) locks. A flock belongs to the open file: threads of one process exclude each other
too, and closing an unrelated descriptor of the file frees nothing, whereas it would drop every fcntl lock of the
process. The kernel frees the locks of a process that dies. flock has no timeout, so waiting is polling, and nobody
waits longer than `patience_s`.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.disk.locks import free_lock, open_lock
from catalog.errors import SetupError

__all__ = ["FairLock", "IndexBusyError"]

_POLL_S = 0.001


class IndexBusyError(SetupError):
    """The index stayed in use for longer than the caller's patience. It never leaves this package."""


class FairLock:
    """The fair reader-writer lock made of two lock files. It holds nothing between calls."""

    def __init__(self, *, queue: Path, access: Path) -> None:
        self._queue = queue
        self._access = access

    @contextmanager
    def reading(self, *, patience_s: float) -> Iterator[None]:
        """Run the body while no writer runs its own. IndexBusyError after `patience_s`."""
        deadline = time.monotonic() + patience_s
        with _lock_file(self._access) as access:
            with _lock_file(self._queue) as queue:
                _take(queue, fcntl.LOCK_EX, deadline)
                _take(access, fcntl.LOCK_SH, deadline)
            yield

    @contextmanager
    def writing(self, *, patience_s: float) -> Iterator[None]:
        """Run the body while nobody else runs theirs. IndexBusyError after `patience_s`."""
        deadline = time.monotonic() + patience_s
        with _lock_file(self._queue) as queue, _lock_file(self._access) as access:
            _take(queue, fcntl.LOCK_EX, deadline)
            _take(access, fcntl.LOCK_EX, deadline)
            yield


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    """Yield a descriptor of the lock file; at the end of the body, whatever was locked through it is free again."""
    try:
        descriptor = open_lock(path)
    except OSError as error:
        raise IndexBusyError(f"{path}: can't be opened for locking: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        free_lock(descriptor)


def _take(descriptor: int, how: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise IndexBusyError("the index is in use") from None
            time.sleep(_POLL_S)
