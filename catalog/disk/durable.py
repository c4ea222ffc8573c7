"""Durable publication: a file exists under its final name only whole, and survives a power cut once it does.

Invariant: data under a temporary name in the same folder, then fsync, then the final name, then fsync of the folder. A
folder's creation is followed by fsync of its parent, up to the history's root.
"""

import errno
import os
import secrets
from pathlib import Path

__all__ = ["is_temporary", "make_dirs", "publish", "publish_bytes", "publish_exclusive", "sync_dir", "temporary_path"]

_TEMPORARY_SUFFIX = ".tmp"


def sync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(final: Path) -> Path:
    """A name that nobody uses yet, in the folder of `final`. Readers ignore such names."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")


def is_temporary(name: str) -> bool:
    """Whether a file's name is one of `temporary_path`."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def publish(tmp: Path, final: Path) -> None:
    """Make the bytes of `tmp` durable, give them their final name, and make that durable. The caller is the only one
    who writes `final`.
    """
    _sync_file(tmp)
    tmp.rename(final)
    sync_dir(final.parent)


def publish_exclusive(tmp: Path, final: Path) -> bool:
    """As `publish`, unless `final` exists already: then False, and it is as it was. `tmp` is gone afterwards either way."""
    _sync_file(tmp)
    # What is published before must not be lost when this name is kept.
    sync_dir(final.parent)
    try:
        os.link(tmp, final)
        made = True
    except FileExistsError:
        made = False
    finally:
        tmp.unlink()
    sync_dir(final.parent)
    return made


def publish_bytes(data: bytes, final: Path, *, exclusive: bool = False) -> bool:
    """`publish`, or `publish_exclusive`, of `data`; leaves nothing behind when it fails."""
    tmp = temporary_path(final)
    try:
        with tmp.open("xb") as file:
            file.write(data)
        if exclusive:
            return publish_exclusive(tmp, final)
        publish(tmp, final)
        return True
    except OSError:
        tmp.unlink(missing_ok=True)
        raise


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
