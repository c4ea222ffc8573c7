"""Whether a data file is what its manifest says: its size, its header, and every byte by checksum."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import native
from catalog.errors import FormatError
from catalog.header import Entry, read_header
from catalog.manifest import Manifest
from catalog.records import Extent

__all__ = ["DamagedExtent", "check_data_file", "check_extents", "check_header"]

BATCH_BYTES = 64 << 20
_BATCH_EXTENTS = 4096

Buffer: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DamagedExtent:
    """An extent whose bytes are not those that were written, or can't be read."""

    file: str
    field: str
    message: str


def check_header(path: Path, manifest: Manifest) -> None:
    """FormatError when the header's entries are not the manifest's rows, or the header speaks of another part."""
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
    """Read every extent of a manifest and compare its checksum; `progress` gets the bytes of each batch read.

    Takes memory for the largest extent, or BATCH_BYTES. An extent that can't be read is damage, too.
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
    """Read extents and compare their checksums, in the order of files and offsets.

    Takes memory for the largest extent, or BATCH_BYTES. An extent that can't be read is damage, too.
    """
    batches = list(_batches(sorted(extents, key=lambda extent: (extent.file, extent.offset))))
    # One buffer for all: fresh memory costs a page fault every 4 KiB.
    buffer = np.empty(max([1, *map(_total_bytes, batches)]), np.uint8)
    for batch in batches:
        yield from _compared(root, batch, buffer)
        progress(_total_bytes(batch))


def _total_bytes(batch: list[Extent]) -> int:
    return sum(extent.nbytes for extent in batch)


def _batches(extents: list[Extent]) -> Iterator[list[Extent]]:
    batch: list[Extent] = []
    nbytes = 0
    for extent in extents:
        if batch and (nbytes + extent.nbytes > BATCH_BYTES or len(batch) == _BATCH_EXTENTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(extent)
        nbytes += extent.nbytes
    if batch:
        yield batch


def _compared(root: Path, batch: list[Extent], buffer: Buffer) -> Iterator[DamagedExtent]:
    try:
        checksums = _read(root, batch, buffer)
    except (OSError, ValueError) as error:
        if len(batch) > 1:
            for extent in batch:
                yield from _compared(root, [extent], buffer)
        else:
            yield DamagedExtent(batch[0].file, _field(batch[0]), f"not readable: {error}")
        return
    for index, extent in enumerate(batch):
        actual = checksums[16 * index : 16 * index + 16]
        if actual != extent.checksum:
            place = f"bytes {extent.offset} to {extent.offset + extent.nbytes}"
            told = f"{place} have the checksum {actual.hex()}, the manifest says {extent.checksum.hex()}: damaged"
            yield DamagedExtent(extent.file, _field(extent), told)


def _read(root: Path, batch: list[Extent], buffer: Buffer) -> bytes:
    """The checksums of a batch, 16 bytes each."""
    files = sorted({extent.file for extent in batch})
    nbytes = np.array([extent.nbytes for extent in batch], np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(nbytes)[:-1]]).astype(np.uint64)
    return native.read(
        [str(root / file) for file in files],
        file_index=np.array([files.index(extent.file) for extent in batch], np.uint32),
        offsets=np.array([extent.offset for extent in batch], np.uint64),
        addresses=starts + np.uint64(buffer.ctypes.data),
        nbytes=nbytes,
    )


def _field(extent: Extent) -> str:
    return f"checksum of {extent.kind}/{extent.name}"
