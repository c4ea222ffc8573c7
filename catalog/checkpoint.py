"""One committed checkpoint as its marker and manifests say, checked against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import native
from catalog.errors import CorruptError, FormatError
from catalog.layout import HistoryPaths
from catalog.manifest import Manifest, decode_manifest
from catalog.marker import check_manifest, read_marker
from catalog.records import Extent, Marker, MarkerPart
from catalog.sealed import read_bounded

__all__ = ["Checkpoint", "LogicalTensor", "check_data_files", "logical_tensors", "read_checkpoint", "read_part"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The marker and the manifest of every rank, in order of rank."""

    marker: Marker
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor as all its fragments together make it. `hash` tells two states apart: the checksum of its one
    fragment, else the checksum of the list of its fragments' starts and checksums."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    placement: str
    aliases: tuple[str, ...]
    fragments: int
    nbytes: int
    hash: bytes
    covered: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


def read_checkpoint(paths: HistoryPaths, run: str, step: int) -> Checkpoint:
    """Marker and manifests, without a look at the data files. FileNotFoundError when the checkpoint is not committed; FormatError or
    CorruptError names file and field."""
    marker = read_marker(paths, run, step)
    return Checkpoint(marker, tuple(read_part(paths, marker, part) for part in marker.parts))


def read_part(paths: HistoryPaths, marker: Marker, part: MarkerPart) -> Manifest:
    """The manifest of one rank, as the marker names it."""
    path = paths.root / part.manifest
    try:
        data = read_bounded(path)
    except FileNotFoundError as error:
        raise CorruptError(f"{path}: the file is missing, the marker of {marker.run}:{marker.step} names it") from error
    actual = native.checksum(data).hex()
    if actual != part.manifest_checksum:
        raise CorruptError(
            f"{path}: field manifest_checksum: the marker says {part.manifest_checksum}, the file gives {actual}: "
            "the file was changed or damaged"
        )
    manifest = decode_manifest(data, path=path)
    check_manifest(
        manifest,
        run=marker.run,
        step=marker.step,
        rank=part.rank,
        world_size=marker.world_size,
        layout=marker.layout,
        path=path,
    )
    if manifest.data_bytes != part.data_bytes:
        raise FormatError(f"{path}: field data_bytes: {manifest.data_bytes}, the marker says {part.data_bytes}")
    return manifest


def check_data_files(paths: HistoryPaths, checkpoint: Checkpoint) -> None:
    """Every file that the extents name is there, of the size the marker says, and holds them."""
    sizes = {part.data: part.data_bytes for part in checkpoint.marker.parts}
    reach: dict[str, int] = dict(sizes)
    for manifest in checkpoint.manifests:
        columns = (manifest.table[name].to_pylist() for name in ("file", "offset", "nbytes"))
        for file, offset, nbytes in zip(*columns, strict=True):
            reach[file] = max(reach.get(file, 0), offset + nbytes)
    root = paths.root.resolve()
    for file, end in reach.items():
        path = paths.root / file
        if not path.resolve().is_relative_to(root):
            raise FormatError(f"{path}: field file: leads out of the history {root}")
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise CorruptError(
                f"{path}: the file is missing, checkpoint {checkpoint.marker.run}:{checkpoint.marker.step} needs it"
            ) from error
        if size != sizes.get(file, size):
            raise CorruptError(
                f"{path}: field data_bytes: {size} bytes, the marker says {sizes[file]}: truncated or changed"
            )
        if end > size:
            raise FormatError(f"{path}: field nbytes: extents reach byte {end} of a file of {size} bytes")


def logical_tensors(checkpoint: Checkpoint, *, where: str) -> list[LogicalTensor]:
    """All tensors and objects of a checkpoint, header and padding left out; FormatError when the fragments of one
    contradict each other or overlap. Of rank_local ones the fragments of all ranks count, each rank by itself."""
    groups: dict[tuple[str, str], list[tuple[int, Extent]]] = {}
    for manifest in checkpoint.manifests:
        for extent in manifest.extents():
            if extent.kind not in ("header", "pad"):
                groups.setdefault((extent.kind, extent.name), []).append((manifest.rank, extent))
    return [_merged(members, where=where) for members in groups.values()]


def _merged(members: Sequence[tuple[int, Extent]], *, where: str) -> LogicalTensor:
    first = members[0][1]
    apart = first.placement == "rank_local"
    members = sorted(members, key=lambda member: (member[0] if apart else 0, member[1].start, member[1].numel))
    owner, end, covered = -1, 0, 0
    for rank, extent in members:
        if apart and rank != owner:
            # What is local to a rank may differ in form too: an object's JSON is as long as it is.
            owner, end, first = rank, 0, extent
        if (extent.dtype, extent.shape, extent.placement) != (first.dtype, first.shape, first.placement):
            raise FormatError(
                f"{where}: field shape of {first.kind}/{first.name}: fragments disagree: {first.dtype} {list(first.shape)} "
                f"{first.placement} and {extent.dtype} {list(extent.shape)} {extent.placement}"
            )
        if extent.start < end:
            raise FormatError(
                f"{where}: field start of {first.kind}/{first.name}: the fragment at {extent.start} overlaps the one before it, which ends at {end}"
            )
        end = extent.start + extent.numel
        if not apart or rank == members[0][0]:
            covered += extent.numel
    first = members[0][1]
    if len(members) == 1:
        digest = first.checksum
    else:
        digest = native.checksum(
            b"".join(extent.start.to_bytes(8, "little") + extent.checksum for _, extent in members)
        )
    return LogicalTensor(
        name=first.name,
        kind=first.kind,
        dtype=first.dtype,
        shape=first.shape,
        placement=first.placement,
        aliases=first.aliases,
        fragments=len(members),
        nbytes=sum(extent.nbytes for _, extent in members),
        hash=digest,
        covered=covered,
    )
