"""Publishes an export: it is written whole under a temporary name, made durable, and only then given its final name.

Invariant: under the final name there is nothing, what was there before, or the whole export. What is replaced is moved
aside first and removed last, so an export that fails never loses it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from catalog.disk.durable import sync_dir, temporary_path
from catalog.errors import SetupError

__all__ = ["new_target"]


@contextmanager
def new_target(path: Path, *, history: Path, overwrite: bool) -> Iterator[Path]:
    """Give a temporary path for a file or folder; it becomes `path` when the block ends, and is removed on errors.

    SetupError when `path` exists (unless `overwrite`), or when writing it would touch the history or the working
    directory.
    """
    final = path.absolute()
    _check(final, history=history, overwrite=overwrite)
    temporary = temporary_path(final)
    try:
        yield temporary
        _sync(temporary)
        _publish(temporary, final, overwrite=overwrite)
    except BaseException:
        _remove(temporary)
        raise


def _check(final: Path, *, history: Path, overwrite: bool) -> None:
    if not final.parent.is_dir():
        raise SetupError(f"export to {final}: its folder {final.parent} does not exist; make it first")
    inside = final.resolve()
    for name, taken in (("history", history.resolve()), ("working directory", Path.cwd())):
        holds = taken == inside or inside in taken.parents
        if holds or (name == "history" and taken in inside.parents):
            raise SetupError(f"export to {final}: that would write over the {name} {taken}; name another place")
    if final.is_symlink():
        raise SetupError(f"export to {final}: it is a symbolic link; name what it points to")
    if final.exists() and not overwrite:
        raise SetupError(f"export to {final}: it exists; name another place, or pass overwrite=True")


def _publish(temporary: Path, final: Path, *, overwrite: bool) -> None:
    aside = temporary_path(final)
    replaced = final.exists()
    if replaced and not overwrite:
        raise SetupError(f"export to {final}: something was put there while the export was written")
    if replaced:
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if replaced:
            aside.rename(final)
        raise
    sync_dir(final.parent)
    if replaced:
        _remove(aside)


def _sync(path: Path) -> None:
    """Make every file and folder below `path` durable."""
    if not path.is_dir():
        _sync_file(path)
        return
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync_file(Path(folder) / name)
        sync_dir(Path(folder))


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
