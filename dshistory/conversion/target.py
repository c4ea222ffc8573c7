"""Publishes a file or folder that is written whole under a temporary name, made durable, and only then given its name.

Invariant: under the final name there is nothing, what was there before, or the whole new content. What is replaced is
moved aside first and removed last, so a failure, or Ctrl-C, never loses it.
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
def new_target(path: Path, *, what: str, source: tuple[str, Path], overwrite: bool) -> Iterator[Path]:
    """Give a temporary path for a file or folder; it becomes `path` when the block ends, and is removed on errors.

    what: what is written, for messages. source: what is read for it, as its name in messages and its folder. SetupError
    when `path` exists (unless `overwrite`), or when writing it would touch the source or the working directory.
    """
    final = path.absolute()
    subject = f"{what} to {final}"
    _check(final, subject, source=source, overwrite=overwrite)
    temporary = temporary_path(final)
    try:
        yield temporary
        _sync(temporary)
        _publish(temporary, final, subject, overwrite=overwrite)
    except BaseException:
        _remove(temporary)
        raise


def _check(final: Path, subject: str, *, source: tuple[str, Path], overwrite: bool) -> None:
    if not final.parent.is_dir():
        raise SetupError(f"{subject}: its folder {final.parent} does not exist; make it first")
    inside = final.resolve()
    for name, taken in ((source[0], source[1].resolve()), ("working directory", Path.cwd())):
        holds = taken == inside or inside in taken.parents
        if holds or (name == source[0] and taken in inside.parents):
            raise SetupError(f"{subject}: that would write over the {name} {taken}; name another place")
    if final.is_symlink():
        raise SetupError(f"{subject}: it is a symbolic link; name what it points to")
    if final.exists() and not overwrite:
        raise SetupError(f"{subject}: it exists; name another place, or pass overwrite=True")


def _publish(temporary: Path, final: Path, subject: str, *, overwrite: bool) -> None:
    aside = temporary_path(final)
    replaced = final.exists()
    if replaced and not overwrite:
        raise SetupError(f"{subject}: something was put there while it was written")
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
