"""Durable publication: a file has its final name only when it is whole, and then it survives a power cut.

Invariant: whoever sees a final name, before or after a power cut, sees all bytes of the file. `publish` keeps it in
this order, and no step can be left out or swapped:

1. The data is written under a temporary name in the same folder. Readers ignore such names, and a rename within one
   folder is atomic.
2. fsync of the file. Without it the name could become durable before the bytes, and a power cut would leave a file of
   zeros or of half the length under the final name.
3. rename(2) to the final name; or link(2), which fails when the name exists, where several processes may publish the
   same file (`publish_exclusive`).
4. fsync of the folder. A name is data of its folder; until then a power cut may take the file away again.

A new folder is a name too: `make_dirs` makes each one durable in its parent.
"""

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path

__all__ = [
    "final_name",
    "is_full",
    "is_temporary",
    "make_dirs",
    "publish",
    "publish_bytes",
    "publish_exclusive",
    "sync_dir",
    "sync_dir_if_allowed",
    "temporary_path",
]

_TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: BaseException) -> bool:
    """Return whether an error says that the disk is full, or what its user may have of it."""
    return isinstance(error, OSError) and error.errno in _FULL


def sync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_dir_if_allowed(path: Path) -> None:
    """Make the names in a folder durable, unless this process may not read it: somebody else's folder, in which one may
    make files but not list them, can't be synced."""
    with contextlib.suppress(PermissionError):
        sync_dir(path)


def _sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(final: Path) -> Path:
    """Return a name in the folder of `final` that no other writer uses. Readers ignore such names."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")


def is_temporary(name: str) -> bool:
    """Return whether a name is one that readers ignore, as those that `temporary_path` makes."""
    return name.startswith(".") and name.endswith(_TEMPORARY_SUFFIX)


def final_name(temporary: str) -> str | None:
    """Return the name for whose file `temporary_path` made exactly this name, or None when it made no such name."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def publish(tmp: Path, final: Path) -> None:
    """Make the bytes of `tmp` durable, rename it to `final`, and make the name durable. An existing `final` is
    replaced: the caller must be the only one who writes it."""
    _sync_file(tmp)
    tmp.rename(final)
    sync_dir(final.parent)


def publish_exclusive(tmp: Path, final: Path) -> bool:
    """Publish like `publish` and return True, unless `final` exists: then leave it unchanged and return False.

    In both cases `tmp` is gone afterwards and `final` is durable. Any number of processes may try at once.
    """
    _sync_file(tmp)
    # The marker of a checkpoint is published this way. All names published in the folder before it must be durable
    # before it can be.
    sync_dir(final.parent)
    try:
        os.link(tmp, final)
        made = True
    except FileExistsError:
        made = False
    finally:
        tmp.unlink()
    # Also when another process made the name: it may not have synced the folder yet, and the caller relies on the file.
    sync_dir(final.parent)
    return made


def publish_bytes(data: bytes, final: Path, *, exclusive: bool = False) -> bool:
    """Write `data` to a temporary file and publish it: with `publish` (always True), or with `publish_exclusive` when
    `exclusive`. An OSError leaves no temporary file behind."""
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
    """Create `path` and its missing parents below `root`, each durable in its parent. Existing folders are left
    alone."""
    missing = []
    at = path
    while at != root and not at.is_dir():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except OSError as error:
            # Another process may create the same folder at the same time.
            if error.errno != errno.EEXIST or not folder.is_dir():
                raise
        sync_dir_if_allowed(folder.parent)
