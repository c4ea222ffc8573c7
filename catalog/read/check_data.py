"""Checks a data file against its manifest: its size, its header, and every byte by checksum."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from catalog.errors import FormatError
from catalog.format.header import Entry, read_header
from catalog.format.manifest import Manifest
from catalog.read.stored_bytes import Buffer, batches, mismatches, read_pieces
from catalog.records import Extent

__all__ = ["DamagedExtent", "check_data_file", "check_extents", "check_header"]

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DamagedExtent:
    """An extent that can't be read, or whose bytes are not those that were written."""

    file: str
    field: str
    message: str


def check_header(path: Path, manifest: Manifest) -> None:
    """Raise FormatError when the entries are not the manifest's rows, or the header belongs to another part."""
    header = read_header(path)
    facts = {"format": "dshistory-1", "run": manifest.run, "step": str(manifest.step), "rank": str(manifest.rank)}
    for field, value in facts.items():
        if header.metadata.get(field, value) != value:
            raise FormatError(f"{path}: field __metadata__.{field}: {header.metadata[field]!r} where {value!r} belongs")
    own = [extent for extent in manifest.extents() if extent.file == manifest.file and extent.kind != "header"]
    expected = {entry.key: entry for entry in (_entry(extent, header.data_start) for extent in own)}
    found = {entry.key: entry for entry in header.entries}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise FormatError(
                f"{path}: header entry {key!r}: the header has {found.get(key)}, the manifest {expected.get(key)}"
            )


def _entry(extent: Extent, data_start: int) -> Entry:
    whole = extent.numel == prod(extent.shape)
    key = extent.name if extent.kind == "pad" else f"{extent.kind}/{extent.name}"
    if not whole:
        key += f"[{extent.start}:{extent.start + extent.numel}]"
    begin = extent.offset - data_start
    return Entry(key, extent.dtype, extent.shape if whole else (extent.numel,), begin, begin + extent.nbytes)


def check_data_file(root: Path, manifest: Manifest, *, progress: Callable[[int], None]) -> Iterator[DamagedExtent]:
    """Read every extent of a manifest and yield the damaged ones; `progress` gets the bytes of each batch read.

    Takes memory for the largest extent, or BATCH_BYTES. An extent that can't be read is damaged, too.
    """
    path = root / manifest.file
    size = path.stat().st_size if path.is_file() else None
    if size != manifest.data_bytes:
        told = "the file is missing" if size is None else f"{size} bytes, the manifest says {manifest.data_bytes}"
        yield DamagedExtent(manifest.file, "data_bytes", told)
    if size is None:
        return
    yield from check_extents(root, manifest.extents(), progress=progress)


def check_extents(
    root: Path, extents: Iterable[Extent], *, progress: Callable[[int], None] = lambda nbytes: None
) -> Iterator[DamagedExtent]:
    """Read extents in the order of files and offsets and yield the damaged ones; live memory is not touched.

    Takes memory for the largest extent, or BATCH_BYTES. An extent that can't be read is damaged, too.
    """
    in_order = sorted(extents, key=lambda extent: (extent.file, extent.offset))
    todo = list(batches(in_order, most_bytes=BATCH_BYTES))
    # One buffer for all: fresh memory costs a page fault every 4 KiB.
    buffer = np.empty(max([1, *map(_total_bytes, todo)]), np.uint8)
    for batch in todo:
        yield from _compared(root, batch, buffer)
        progress(_total_bytes(batch))


def _total_bytes(batch: list[Extent]) -> int:
    return sum(extent.nbytes for extent in batch)


def _compared(root: Path, batch: list[Extent], buffer: Buffer) -> Iterator[DamagedExtent]:
    try:
        checksums = read_pieces(root, [(extent.file, extent.offset, extent.nbytes) for extent in batch], buffer)
    except (OSError, ValueError) as error:
        if len(batch) > 1:
            for extent in batch:
                yield from _compared(root, [extent], buffer)
        else:
            yield DamagedExtent(batch[0].file, _field(batch[0]), f"not readable: {error}")
        return
    for extent, actual in mismatches(batch, checksums):
        place = f"bytes {extent.offset} to {extent.offset + extent.nbytes}"
        told = f"{place} have the checksum {actual.hex()}, the manifest says {extent.checksum.hex()}: damaged"
        yield DamagedExtent(extent.file, _field(extent), told)


def _field(extent: Extent) -> str:
    return f"checksum of {extent.kind}/{extent.name}"
