"""One committed checkpoint: its marker and its manifests, checked against each other."""

import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

import native
from catalog.data_files.data_files import data_file_bytes
from catalog.data_files.needed_files import NeededFile
from catalog.disk.checked_parquet import read_bounded
from catalog.disk.regular_file import check_folders
from catalog.errors import CorruptError, FormatError, NotFoundError
from catalog.format.manifest import Manifest, decode_manifest
from catalog.format.marker import check_manifest, read_marker
from catalog.format.written_manifests import written_manifests
from catalog.paths import HistoryPaths
from catalog.records import Marker, MarkerPart

__all__ = ["Checkpoint", "check_data_files", "needed_by", "read_checkpoint", "read_part"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The marker and the manifest of every rank, in order of rank."""

    marker: Marker
    manifests: tuple[Manifest, ...]


def read_checkpoint(paths: HistoryPaths, run: str, step: int) -> Checkpoint:
    """Read the marker and every manifest; the data files are not opened.

    NotFoundError when the checkpoint is not committed; FormatError or CorruptError names file and field.
    """
    marker = read_marker(paths, run, step)
    return Checkpoint(marker, tuple(read_part(paths, marker, part) for part in marker.parts))


def read_part(paths: HistoryPaths, marker: Marker, part: MarkerPart) -> Manifest:
    """Read the manifest of one rank, the one that the marker names. NotFoundError when the checkpoint was removed since
    its marker was read; FormatError, CorruptError as `read_checkpoint`."""
    path = paths.root / part.manifest
    try:
        data = read_bounded(path)
    except FileNotFoundError as error:
        _require_there(paths, marker)
        raise CorruptError(f"{path}: the file is missing, the marker of {marker.run}:{marker.step} names it") from error
    actual = native.checksum(data)
    if actual.hex() != part.manifest_checksum:
        raise CorruptError(
            f"{path}: field manifest_checksum: the marker says {part.manifest_checksum}, the file gives "
            f"{actual.hex()}: the file was changed or damaged"
        )
    manifest = written_manifests.get(actual) or decode_manifest(data, path=path)
    check_manifest(
        manifest,
        run=marker.run,
        step=marker.step,
        rank=part.rank,
        world_size=marker.world_size,
        layout_hash=marker.layout_hash,
        path=path,
    )
    if manifest.data_bytes != part.data_bytes:
        raise FormatError(f"{path}: field data_bytes: {manifest.data_bytes}, the marker says {part.data_bytes}")
    return manifest


def _require_there(paths: HistoryPaths, marker: Marker) -> None:
    """Raise NotFoundError when a checkpoint was removed since its marker was read: then its files are not missing."""
    if not os.path.lexists(paths.marker(marker.run, marker.step)):
        raise NotFoundError(f"checkpoint {marker.run}:{marker.step} of {paths.root} was just removed")


def needed_by(checkpoint: Checkpoint) -> tuple[NeededFile, ...]:
    """Return the data files that a checkpoint needs, its own and those that it refers to, each once."""
    # A row of the codec `rounded` names fewer bytes than the raw row that has them, which it never reaches beyond.
    reach = {part.data: part.data_bytes for part in checkpoint.marker.parts}
    for manifest in checkpoint.manifests:
        ends = pc.add(manifest.table["offset"], manifest.table["nbytes"])
        by_file = pa.table({"file": manifest.table["file"], "end": ends}).group_by("file").aggregate([("end", "max")])
        for file, end in zip(*(by_file[name].to_pylist() for name in ("file", "end_max")), strict=True):
            reach[file] = max(reach.get(file, 0), end)
    return tuple(NeededFile(file, nbytes) for file, nbytes in reach.items())


def check_data_files(paths: HistoryPaths, checkpoint: Checkpoint) -> None:
    """Check that every file that the extents name exists, has the size that the marker says, and reaches to their ends.

    FormatError or CorruptError names the file; NotFoundError when the checkpoint was removed since it was read.
    """
    sizes = {part.data: part.data_bytes for part in checkpoint.marker.parts}
    root = paths.root.resolve()
    for file, end in needed_by(checkpoint):
        path = paths.root / file
        if not path.resolve().is_relative_to(root):
            raise FormatError(f"{path}: field file: leads out of the history {root}")
        check_folders(path.parent, root=paths.root)
        try:
            size = data_file_bytes(paths.root, file)
        except FileNotFoundError as error:
            _require_there(paths, checkpoint.marker)
            raise CorruptError(
                f"{path}: the file is missing, checkpoint {checkpoint.marker.run}:{checkpoint.marker.step} needs it"
            ) from error
        if size != sizes.get(file, size):
            raise CorruptError(
                f"{path}: field data_bytes: {size} bytes, the marker says {sizes[file]}: truncated or changed"
            )
        if end > size:
            raise FormatError(f"{path}: field nbytes: extents reach byte {end} of a file of {size} bytes")
