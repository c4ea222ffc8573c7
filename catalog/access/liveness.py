"""Decides whether a run whose locks look free is dead, so that its leftovers may be removed.

A lock that looks free proves a dead owner only where this host would see that lock held. flock(2) works between the
processes of one host on every file system, and between hosts on some:

- taken on this host, in this boot: the lock decides;
- taken on another host of a run whose ranks have seen each other's locks across hosts: the lock decides;
- taken on this host in an earlier boot, and no session has written in the run since this boot began: the owner is dead;
- anything else, such as another host, or a lock file of an earlier release, which does not say where it was taken: the
  run is taken for dead when no session has written in it for `DEAD_AFTER_S`.

What is done to a dead run later, such as its compaction, does not count: it would look alive for a week again.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from catalog.disk.durable import final_name
from catalog.format.lock_file import LockOwner, lock_owner, read_lock_owner
from catalog.paths import HistoryPaths, parse_step_dir

__all__ = ["DEAD_AFTER_S", "is_certainly_dead"]

DEAD_AFTER_S = 7 * 86_400.0
"""A live session writes to its journal at least once a minute while it trains. A week is longer than a training waits
in a queue, in a debugger or behind a file server that is down over a long weekend, and what lies there meanwhile costs
only disk space."""


def is_certainly_dead(paths: HistoryPaths, run: str, *, world_size: int) -> bool:
    """Return whether no process can be writing a run. Its locks must look free, and the caller must hold them.
    FormatError when a lock file is no regular file."""
    here = lock_owner()
    owners = (_owner(paths, run, rank) for rank in range(world_size))
    undecided = [owner for owner in owners if owner is None or not _lock_decides(owner, here)]
    if not undecided:
        return True
    last_change = _last_change(paths, run)
    if all(owner is not None and owner.host == here.host for owner in undecided):
        # Two hosts may have one name: then the run may live on the other, and go on changing.
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if last_change < booted:
            return True
    return time.time() - last_change > DEAD_AFTER_S


def _owner(paths: HistoryPaths, run: str, rank: int) -> LockOwner | None:
    try:
        return read_lock_owner(paths.lock(run, rank))
    except FileNotFoundError:
        return None


def _lock_decides(owner: LockOwner, here: LockOwner) -> bool:
    return owner.shared or (owner.host == here.host and owner.boot == here.boot != "")


def _last_change(paths: HistoryPaths, run: str) -> float:
    """Return the time of the last write by the run's session, in seconds since 1970, by the file system's clock."""
    try:
        return max(os.lstat(path).st_mtime for path in _written_by_session(paths, run))
    except FileNotFoundError:
        # A file that goes between the listing and the look at it is a change of now.
        return time.time()


def _written_by_session(paths: HistoryPaths, run: str) -> Iterator[str]:
    """Yield what only the session of a run writes, one of which changes whenever it does anything.

    Folders are left out, and so are statistics, audits, packed images and the journals of those who are no rank:
    whoever looks at a dead run, compacts or prunes it changes these, and must not make it look alive.
    """
    yield str(paths.run_json(run))
    yield from map(str, _entries(paths.locks_dir(run)))
    yield from map(str, _entries(paths.redo_dir(run)))
    for folder in (paths.journal_dir(run), paths.fingerprints_dir(run)):
        yield from (str(path) for path in _entries(folder) if (final_name(path.name) or path.name).startswith("rank-"))
    marker = paths.marker(run, 0).name
    for step in _entries(paths.steps_dir(run)):
        if parse_step_dir(step.name) is not None and step.is_dir() and not step.is_symlink():
            names = os.listdir(step)
            # A committed checkpoint was last written when it got its marker; one that was begun may be written now.
            yield from (f"{step}/{name}" for name in ([marker] if marker in names else names))
            if not names:
                yield str(step)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
