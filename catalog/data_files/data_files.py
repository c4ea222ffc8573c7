"""A data file as the disk has it: itself, or its packed image. Manifests and markers always name the data file.

Where both are there, the data file counts: somebody is about to replace it. Whoever finds a data file gone looks for
the image, which may just have taken its place.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from catalog.disk.regular_file import what_it_is
from catalog.errors import FormatError
from catalog.format.packed_file import PackedFile, read_packed_file
from catalog.paths import HistoryPaths, is_packed_name, packed_file, parse_data_file, step_folder
from catalog.records import CheckpointRef

__all__ = ["data_file_bytes", "image_of", "only_packed", "packed_bytes"]


def only_packed(root: Path, files: Iterable[str]) -> frozenset[str]:
    """Return those of the data files, named relative to the history, of which there is only the packed image."""
    return frozenset(
        file
        for file in files
        if not os.path.lexists(f"{root}/{file}") and parse_data_file(file) and os.path.lexists(root / packed_file(file))
    )


def image_of(root: Path, file: str) -> PackedFile:
    """Return the packed image of a data file. FileNotFoundError when it has none, FormatError or CorruptError as
    `read_packed_file`."""
    return read_packed_file(root / packed_file(file), file=file)


def data_file_bytes(root: Path, file: str) -> int:
    """Return the size of a data file, also of one that is packed. FormatError when it is no regular file, or its image
    is none; FileNotFoundError when neither is there."""
    path = root / file
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return image_of(root, file).data_bytes
    if not stat.S_ISREG(facts.st_mode):
        raise FormatError(f"{path}: is {what_it_is(facts.st_mode)} where a history has a regular file")
    return facts.st_size


def packed_bytes(paths: HistoryPaths, ref: CheckpointRef) -> int:
    """Return the bytes of a checkpoint's packed images; 0 when it has none, or is gone."""
    try:
        with os.scandir(f"{paths.root}/{step_folder(ref.run, ref.step)}") as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if is_packed_name(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return 0
