"""Durable publication: a file exists under its final name only whole, and survives a power cut once it does.

Invariant: data, then fsync, then the name, then fsync of the folder. A folder's creation is followed by fsync of its
   parent, up to the history's root.
"""

import errno
import os
from pathlib import Path

__all__ = ["make_dirs", "publish", "publish_exclusive", "sync_dir", "write_new"]


def sync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes) -> None:
    """Create `path` (it must not exist) with `data`, and fsync it; leaves nothing behind when it fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def publish(tmp: Path, final: Path) -> None:
    """Give the durable file `tmp` its final name, replacing nothing that other ranks write, and make the name durable."""
    tmp.rename(final)
    sync_dir(final.parent)


def publish_exclusive(tmp: Path, final: Path) -> bool:
    """Give `tmp` its final name unless that exists already (False); `tmp` is gone afterwards either way."""
    try:
        os.link(tmp, final)
    except FileExistsError:
        return False
    finally:
        tmp.unlink()
    sync_dir(final.parent)
    return True


def make_dirs(path: Path, *, root: Path) -> None:
    """Make `path` and its missing parents below `root`, each made durable in its own parent. Folders that exist are
    left alone.
    """
    missing = []
    at = path
    while at != root and not at.is_dir():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except OSError as error:
            if error.errno != errno.EEXIST or not folder.is_dir():
                raise
        sync_dir(folder.parent)
