"""Pins: who reads a checkpoint keeps it from being removed meanwhile.

A pin is a shared lock, flock(2), on the marker of the checkpoint; who removes a checkpoint takes the same lock alone,
and leaves the checkpoint when it can't. So a pin needs no file of its own and no right to write, and a reader that dies
has none any more. What a pinned checkpoint refers to stays with it, since nothing that a listed checkpoint refers to is
removed.

Where flock(2) reaches only the processes of one host, a reader on another host is not seen. Its reads then fail by
name: what is removed is gone, and never other bytes.
"""

import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from catalog.disk.locks import free_lock, share_lock, try_lock
from catalog.errors import NotFoundError
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef

__all__ = ["alone_with", "is_pinned", "pin", "pin_while_alive", "pinned"]

_UNPINNED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMFILE, errno.ENFILE)
"""Where a file system has no locks, nobody can remove anything either. Where no more files can be opened, reading goes
on
without a pin."""


@contextmanager
def pinned(paths: HistoryPaths, *refs: CheckpointRef) -> Iterator[None]:
    """Keep checkpoints from being removed until the end of the body. NotFoundError when one is not there, or is being
    removed."""
    pins: list[int] = []
    try:
        for ref in refs:
            held = pin(paths, ref)
            if held is not None:
                pins.append(held)
        yield
    finally:
        for held in pins:
            free_lock(held)


def pin_while_alive(owner: object, paths: HistoryPaths, *refs: CheckpointRef) -> None:
    """Keep checkpoints from being removed as long as `owner` lives. The errors are those of `pin`."""
    for ref in refs:
        held = pin(paths, ref)
        if held is not None:
            weakref.finalize(owner, free_lock, held)


def pin(paths: HistoryPaths, ref: CheckpointRef) -> int | None:
    """Keep a checkpoint from being removed until `catalog.disk.locks.free_lock` gets what this returns; None where the
    file system has no locks. NotFoundError when the checkpoint is not there, or is being removed."""
    marker = paths.marker(ref.run, ref.step)
    try:
        held = share_lock(marker)
    except FileNotFoundError as error:
        raise _removed(paths, ref) from error
    except OSError as error:
        if error.errno in _UNPINNED:
            return None
        raise
    if held is None:
        raise _removed(paths, ref)
    # The lock was waited for: the checkpoint may have been removed by then, while the open file still has the lock.
    if not _is_at(held, marker):
        free_lock(held)
        raise _removed(paths, ref)
    return held


@contextmanager
def alone_with(paths: HistoryPaths, ref: CheckpointRef) -> Iterator[bool]:
    """Yield whether nobody reads a checkpoint; then nobody can begin to until the end of the body. NotFoundError when
    it is not there."""
    marker = paths.marker(ref.run, ref.step)
    try:
        held = try_lock(marker, create=False)
    except FileNotFoundError as error:
        raise _removed(paths, ref) from error
    if held is None:
        yield False
        return
    try:
        if not _is_at(held, marker):
            raise _removed(paths, ref)
        yield True
    finally:
        free_lock(held)


def is_pinned(paths: HistoryPaths, ref: CheckpointRef) -> bool:
    """Return whether somebody reads a checkpoint, as far as this host can see; False in a history that this process may
    not write, since it can't remove anything there. NotFoundError when it is not there."""
    try:
        with alone_with(paths, ref) as alone:
            return not alone
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return False
        raise


def _is_at(descriptor: int, path: os.PathLike[str]) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _removed(paths: HistoryPaths, ref: CheckpointRef) -> NotFoundError:
    return NotFoundError(f"checkpoint {ref} of {paths.root} is not there: it was removed, or never committed")
