"""Checks a data file against its manifest: its size, its header, and every byte by checksum."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, takewhile
from math import prod
from pathlib import Path
from time import monotonic

from catalog.data_files.data_files import data_file_bytes, only_packed
from catalog.data_files.memory_ahead import MemoryAhead
from catalog.data_files.pieces import Piece, piece_of
from catalog.data_files.stored_bytes import Buffer, ReadBuffer, by_place, bytes_in_files, mismatches, place_batches
from catalog.errors import FormatError
from catalog.format.header import HEADER_LENGTH_BYTES, MAX_HEADER_BYTES, Entry, Header, parse_header, read_header
from catalog.format.manifest import Manifest
from catalog.records import Extent

__all__ = ["DamagedExtent", "check_data_file", "check_extents", "check_header"]

BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DamagedExtent:
    """An extent that can't be read, or whose bytes are not those that were written."""

    file: str
    field: str
    message: str


def check_header(root: Path, manifest: Manifest) -> None:
    """Raise FormatError when the entries are not the manifest's rows, or the header belongs to another part."""
    path = root / manifest.file
    header = _header(root, manifest)
    facts = {"format": "dshistory-1", "run": manifest.run, "step": str(manifest.step), "rank": str(manifest.rank)}
    for field, value in facts.items():
        if header.metadata.get(field, value) != value:
            raise FormatError(f"{path}: field __metadata__.{field}: {header.metadata[field]!r} where {value!r} belongs")
    own = (extent for extent in manifest.extents() if extent.file == manifest.file and not extent.is_rounded)
    entries = (_entry(extent, header.data_start) for extent in own if extent.kind != "header")
    expected = {entry.key: entry for entry in entries}
    found = {entry.key: entry for entry in header.entries}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise FormatError(
                f"{path}: header entry {key!r}: the header has {found.get(key)}, the manifest {expected.get(key)}"
            )


def _header(root: Path, manifest: Manifest) -> Header:
    """Return the header of a part's data file, from wherever its bytes are."""
    path = root / manifest.file
    if not only_packed(root, [manifest.file]):
        try:
            return read_header(path)
        except FileNotFoundError:
            # A data file that was there a moment ago has given way to its image.
            if not only_packed(root, [manifest.file]):
                raise
    (extent,) = (extent for extent in manifest.extents() if extent.kind == "header")
    if extent.nbytes > HEADER_LENGTH_BYTES + MAX_HEADER_BYTES:
        raise FormatError(f"{path}: a header of {extent.nbytes} bytes, {MAX_HEADER_BYTES} are allowed")
    (found,), _ = ReadBuffer().read(root, _pieces([extent]))
    content = found.tobytes()
    length = int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    text = content[HEADER_LENGTH_BYTES:]
    if length != len(text):
        raise FormatError(f"{path}: the header says that it has {length} bytes, the manifest that it has {len(text)}")
    return parse_header(text, file_bytes=manifest.data_bytes, path=path)


def _entry(extent: Extent, data_start: int) -> Entry:
    whole = extent.numel == prod(extent.shape)
    key = extent.name if extent.kind == "pad" else f"{extent.kind}/{extent.name}"
    if not whole:
        key += f"[{extent.start}:{extent.start + extent.numel}]"
    begin = extent.offset - data_start
    return Entry(key, extent.dtype, extent.shape if whole else (extent.numel,), begin, begin + extent.nbytes)


def check_data_file(
    root: Path, manifest: Manifest, *, progress: Callable[[int], None], share: tuple[int, int] = (0, 1)
) -> Iterator[DamagedExtent]:
    """Read every extent of a manifest and yield the damaged ones; `progress` gets the stored bytes of each
    batch read.

    `share`: a process's number and the number of processes that read together; each extent is one process's.

    Takes memory for the largest extent and what is rounded from it, or BATCH_BYTES. An extent that can't be read is
    damaged, too.
    """
    try:
        size = data_file_bytes(root, manifest.file)
    except FileNotFoundError:
        yield DamagedExtent(manifest.file, "data_bytes", "the file is missing")
        return
    except FormatError as error:
        yield DamagedExtent(manifest.file, "data_bytes", str(error))
        return
    if size != manifest.data_bytes:
        told = f"{size} bytes, the manifest says {manifest.data_bytes}"
        yield DamagedExtent(manifest.file, "data_bytes", told)
        if only_packed(root, [manifest.file]):
            # It is the image of another file, whose blocks may stand for any number of bytes.
            return
    yield from check_extents(root, _share_of(manifest, share), progress=progress)


def _share_of(manifest: Manifest, share: tuple[int, int]) -> Iterator[Extent]:
    """Yield neighbours of about the same number of bytes for each process."""
    own, count = share
    extents = manifest.extents()
    total = max(1, _total_bytes(extents))
    position = 0
    for extent in extents:
        # The middle of an extent decides, so that a large one has one owner. Files of one large extent each, as
        # sharded trainings write them, fall to different processes.
        if ((2 * position + extent.nbytes) * count // (2 * total) + manifest.rank) % count == own:
            yield extent
        position += extent.nbytes


def check_extents(
    root: Path,
    extents: Iterable[Extent],
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
    kept: dict[Extent, Buffer] | None = None,
    most_kept_bytes: int = 0,
) -> Iterator[DamagedExtent]:
    """Read extents by place and yield the damaged ones; live memory is not touched.

    Of the first extents, those that have at most `most_kept_bytes` together, `kept` gets the bytes of as many as there
    is memory for in time. Beyond that it takes memory for the largest extent and what is rounded from it, or
    BATCH_BYTES. An extent that can't be read is damaged, too.
    """
    in_order = sorted(extents, key=by_place)
    fitting = 0 if kept is None else _fitting(in_order, most_kept_bytes)
    buffer = ReadBuffer()
    if kept is not None:
        yield from _keep(root, in_order[:fitting], kept, buffer, progress)
    for batch in place_batches(in_order[fitting:], most_bytes=BATCH_BYTES):
        yield from _compared(root, batch, buffer)
        progress(bytes_in_files(batch))


def _keep(
    root: Path, extents: list[Extent], kept: dict[Extent, Buffer], buffer: ReadBuffer, progress: Callable[[int], None]
) -> Iterator[DamagedExtent]:
    """Read extents, and keep those for which there is memory in time; `buffer` is for the others.

    Memory is taken for the last batch that is left, while the first one is read, which is not kept. Where memory comes
    as fast as the bytes do, nearly all is kept; where it comes more slowly, as much as has come by the end. Reading
    waits for it only where it comes in less than half of the time in which the same bytes would come again: otherwise
    more is done by reading on.
    """
    left = deque(place_batches(extents, most_bytes=BATCH_BYTES))
    # Where there is only one batch, nothing could be read meanwhile.
    read_s, read_bytes = math.inf if len(left) == 1 else 0.0, 1
    with MemoryAhead() as ahead:
        if left:
            ahead.begin(_pieces(left[-1]))
        while left:
            again_s = read_s / read_bytes * max(1, _total_bytes(left[-1]))
            memory = ahead.memory(patience_s=again_s / 2)
            batch = left.popleft() if memory is None else left.pop()
            if left:
                ahead.begin(_pieces(left[-1]))
            began = monotonic()
            if memory is None:
                yield from _compared(root, batch, buffer)
            else:
                yield from _compared(root, batch, memory, kept)
            read_s += monotonic() - began
            read_bytes += _total_bytes(batch)
            progress(bytes_in_files(batch))


def _fitting(extents: list[Extent], most_bytes: int) -> int:
    """Return how many of the first extents have at most so many bytes together."""
    ends = accumulate(extent.nbytes for extent in extents)
    return sum(1 for _ in takewhile(lambda end: end <= most_bytes, ends))


def _pieces(batch: list[Extent]) -> list[Piece]:
    return [piece_of(extent) for extent in batch]


def _total_bytes(batch: list[Extent]) -> int:
    return sum(extent.nbytes for extent in batch)


def _compared(
    root: Path, batch: list[Extent], buffer: ReadBuffer, kept: dict[Extent, Buffer] | None = None
) -> Iterator[DamagedExtent]:
    try:
        pieces, checksums = buffer.read(root, _pieces(batch))
    except (OSError, ValueError) as error:
        if len(batch) > 1:
            # Nothing is kept of them: each takes the memory of the one before.
            for extent in batch:
                yield from _compared(root, [extent], buffer)
        else:
            yield DamagedExtent(batch[0].file, _field(batch[0]), f"not readable: {error}")
        return
    damaged = dict(mismatches(batch, checksums))
    if kept is not None:
        kept.update((extent, piece) for extent, piece in zip(batch, pieces, strict=True) if extent not in damaged)
    for extent, actual in damaged.items():
        told = (
            f"{_bytes_of(extent)} have the checksum {actual.hex()}, the manifest says {extent.checksum.hex()}: damaged"
        )
        yield DamagedExtent(extent.file, _field(extent), told)


def _bytes_of(extent: Extent) -> str:
    source = piece_of(extent).source
    made = f", rounded to {extent.dtype}," if extent.is_rounded else ""
    return f"bytes {source.offset} to {source.offset + source.nbytes}{made}"


def _field(extent: Extent) -> str:
    return f"checksum of {extent.kind}/{extent.name}"
