"""The lock file of a rank: it says which host holds the lock, so that others know whether they can trust the lock.

A rank is alive while its lock is held. But on many shared file systems flock(2) excludes only the processes of one
host: to every other host the lock of a live rank looks free. So a rank writes into its lock file on which host and in
which boot of it the lock was taken, and whether ranks on different hosts have seen each other's locks.
"""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from catalog.disk import json_file
from catalog.disk.regular_file import open_regular
from catalog.errors import FormatError

__all__ = ["LockOwner", "lock_owner", "read_lock_owner", "write_lock_owner"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Where a lock was taken. `boot` identifies one boot of a host, and is empty where the kernel does not tell.
    `shared` is true once ranks on different hosts have seen each other's locks."""

    host: str
    boot: str
    shared: bool = False


@functools.cache
def lock_owner() -> LockOwner:
    """Return the owner of the locks that this process takes."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return LockOwner(socket.gethostname(), boot)


def write_lock_owner(descriptor: int, owner: LockOwner) -> None:
    """Write the owner into the lock file that is open and locked."""
    data = json_file.encode({"host": owner.host, "boot": owner.boot, "shared": owner.shared})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)


def read_lock_owner(path: Path) -> LockOwner | None:
    """Return the owner of the lock at `path`, or None when the file does not tell: releases before this one left it
    empty, and the process that took the lock may have been killed before it wrote. FormatError when it is no regular
    file, FileNotFoundError when there is none."""
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES)
    try:
        content = json_file.decode(data, path=path)
    except FormatError:
        return None
    host, boot, shared = (content.get(field) for field in ("host", "boot", "shared"))
    if not isinstance(host, str) or not isinstance(boot, str) or not isinstance(shared, bool):
        return None
    return LockOwner(host, boot, shared)
