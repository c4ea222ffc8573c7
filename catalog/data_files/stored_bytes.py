"""The bytes of data files: many ranges are read in one call and compared with their checksums.

`native.read` is called here alone, and here alone it is found out that of a data file only the packed image is there,
and low-precision weights are made of their masters: nobody above can tell. Whoever only looks at bytes reads them into
a `ReadBuffer`, which the disk fills without a copy. Whole extents are verified; a piece of an extent has no checksum of
its own, so only `verify` vouches for those.
"""

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

import native
from catalog.data_files.data_files import only_packed
from catalog.data_files.packed_bytes import Wanted, read_images
from catalog.data_files.pieces import Cut, Piece, RawPieces, cuts_of, piece_of
from catalog.data_files.side_threads import begun
from catalog.errors import CorruptError
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = [
    "Buffer",
    "ReadBuffer",
    "batches",
    "by_place",
    "bytes_in_files",
    "mismatches",
    "place_batches",
    "read_to",
    "read_unverified",
    "read_verified",
]

_MOST_IN_BATCH = 4096

_SCRATCH_BYTES = 16 << 20
"""The memory, twice, through which numbers pass that are rounded, and that nobody has asked for themselves."""

_MOST_ROUNDING_THREADS = 8
_ROUNDED_BYTES = 2 << 20
"""The numbers that a thread rounds at a time."""

_POPULATED_BYTES = 8 << 20
"""The memory that is taken at a time."""

_ALIGN = 4096
"""Bytes go from the disk straight to an address that is congruent to their offset modulo this."""

Buffer: TypeAlias = npt.NDArray[np.uint8]


class _Sized(Protocol):
    """An extent, or a part of one."""

    @property
    def nbytes(self) -> int:
        """How many bytes it is."""
        ...


_S = TypeVar("_S", bound=_Sized)


def batches(parts: Iterable[_S], *, most_bytes: int) -> Iterator[list[_S]]:
    """Yield extents, or parts of some, in order, in lists of at most `most_bytes` together; a larger one is a list by
    itself."""
    batch: list[_S] = []
    nbytes = 0
    for part in parts:
        if batch and (nbytes + part.nbytes > most_bytes or len(batch) == _MOST_IN_BATCH):
            yield batch
            batch, nbytes = [], 0
        batch.append(part)
        nbytes += part.nbytes
    if batch:
        yield batch


class _Together(NamedTuple):
    """An extent, and those that are rounded from its numbers."""

    extents: list[Extent]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents)

    def has_numbers_of(self, extent: Extent) -> bool:
        first, source = self.extents[0], piece_of(extent).source
        if first.is_rounded or source.file != first.file:
            return False
        return first.offset <= source.offset and source.offset + source.nbytes <= first.offset + first.nbytes


def by_place(extent: Extent) -> tuple[str, int, bool]:
    """Return the key by which extents come in the order of their bytes, and before those that are made of them."""
    return extent.file, extent.offset, extent.is_rounded


def place_batches(extents: Iterable[Extent], *, most_bytes: int) -> Iterator[list[Extent]]:
    """Yield the extents by place, in lists as `batches` does; one that is rounded is in the list of the extent that has
    its numbers, if that is there, so that these are read once for both.
    """
    groups: list[_Together] = []
    for extent in sorted(extents, key=by_place):
        if extent.is_rounded and groups and groups[-1].has_numbers_of(extent):
            groups[-1].extents.append(extent)
        else:
            groups.append(_Together([extent]))
    for batch in batches(groups, most_bytes=most_bytes):
        yield [extent for group in batch for extent in group.extents]


def bytes_in_files(extents: Iterable[Extent]) -> int:
    """Return how many bytes of data files the extents are; what is rounded is made of others."""
    return sum(extent.nbytes for extent in extents if not extent.is_rounded)


class ReadBuffer:
    """Memory for pieces of files that are looked at and then forgotten; each call of `read` takes it anew.

    It grows to the largest call's bytes, and somewhat more for gaps. Each piece lies at an address congruent to its
    offset, so a long one comes from the disk without a copy: memory of numpy or torch lies where only the processor
    could put those bytes.
    """

    def __init__(self, allocate: Callable[[int], Buffer] | None = None) -> None:
        """allocate: returns memory of a number of bytes that begins on a page, by default in huge pages."""
        self._allocate = allocate or _pages
        self._memory: Buffer = np.empty(0, np.uint8)

    def read(self, root: Path, pieces: Sequence[Piece], *, checksums: bool = True) -> tuple[list[Buffer], bytes]:
        """Return the bytes of each piece, which hold until the next call, and what `read_to` returns. Its errors are
        those of `read_to`. Pieces should be in the order of files and offsets."""
        memory, addresses = self.place(pieces)
        return memory, read_to(root, pieces, addresses, checksums=checksums)

    def populate(self, pieces: Sequence[Piece], *, stopped: Callable[[], bool]) -> None:
        """Take the pages for the pieces now instead of one by one while they are read; give up once `stopped`, which is
        called often, returns True."""
        self.place(pieces)
        for begin in range(0, self._memory.size, _POPULATED_BYTES):
            if stopped():
                return
            self._memory[begin : begin + _POPULATED_BYTES : _ALIGN] = 0

    def place(self, pieces: Sequence[Piece]) -> tuple[list[Buffer], list[int]]:
        """Return the memory for each piece, which holds until the next call, and its address, for a read."""
        positions, nbytes = _congruent(pieces)
        if nbytes > self._memory.size:
            self._memory = self._allocate(nbytes)
        memory = [self._memory[at : at + piece.nbytes] for at, piece in zip(positions, pieces, strict=True)]
        return memory, [self._memory.ctypes.data + at for at in positions]


def _congruent(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Return the position of each piece in aligned memory, and the bytes that all take. Neighbours in a file stay
    neighbours, so that they come by one read; what is rounded comes behind all that is read."""
    positions = [0] * len(pieces)
    before, end, shift = "", 0, 0
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i].rounded_to):
        file, offset, nbytes, _ = pieces[i]
        if file != before or not end <= offset + shift < end + _ALIGN:
            shift = -(-end // _ALIGN) * _ALIGN - offset // _ALIGN * _ALIGN
        positions[i] = offset + shift
        before, end = file, offset + shift + nbytes
    return positions, end


def _pages(nbytes: int) -> Buffer:
    """Return memory that begins on a page, in huge pages where the host gives them."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def read_to(
    root: Path,
    pieces: Sequence[Piece],
    addresses: Sequence[int] | npt.NDArray[np.uint64],
    *,
    checksums: bool = True,
) -> bytes:
    """Read every piece to its address, in parallel, and return the XXH3-128 of each, 16 bytes each, in order; no bytes
    when the caller hashes them (`checksums=False`).

    A file that is stale (ESTALE: on NFS somebody has replaced it while it was open) is opened once more by its name.

    The memory at an address must hold the piece until this returns. A piece that is rounded is made of one that has its
    numbers, where there is such a one, else of numbers that pass through twice _SCRATCH_BYTES. OSError names the path
    and offset that can't be read; FormatError or CorruptError the packed image, or its base, that can't be used;
    ValueError when two pieces of a data file overlap. After an error the memory holds a mixture.
    """
    targets = np.asarray(addresses, np.uint64)
    is_rounded = np.array([bool(piece.rounded_to) for piece in pieces], bool)
    if not is_rounded.any():
        return _read_raw(root, pieces, targets, checksums=checksums)
    raw = [piece for piece in pieces if not piece.rounded_to]
    digests = _read_raw(root, raw, targets[~is_rounded], checksums=checksums)
    read = RawPieces(raw, targets[~is_rounded].tolist())
    _round(root, [Cut(*each) for each in zip(pieces, targets.tolist(), strict=True) if each[0].rounded_to], read)
    return _completed(digests, is_rounded, pieces, targets) if checksums else b""


def _round(root: Path, wanted: Sequence[Cut], read: RawPieces) -> None:
    """Make each piece of its numbers, in several threads: from memory if they were `read`, else beside the reads."""
    in_memory: list[tuple[Cut, int]] = []
    unread: list[Cut] = []
    for one in wanted:
        address = read.address_of(one.piece.source)
        if address is None:
            unread.append(one)
        else:
            in_memory.append((one, address))
    with ThreadPoolExecutor(_rounding_threads(), thread_name_prefix="dshistory-rounding") as pool:
        under_way = [begun(pool, _round_to, *part) for each in in_memory for part in _parts_of(*each)]
        scratch = itertools.cycle([_Scratch(), _Scratch()])
        for cuts, memory in zip(cuts_of(unread, most_bytes=_SCRATCH_BYTES), scratch, strict=False):
            memory.round(root, cuts, pool)
            under_way += memory.under_way
        for one_part in under_way:
            one_part.result()


class _Scratch:
    """Memory that numbers pass through: it is read into again when all that it had is rounded."""

    def __init__(self) -> None:
        self.under_way: list[Future[None]] = []
        self._buffer = ReadBuffer()

    def round(self, root: Path, cuts: Sequence[Cut], pool: Executor) -> None:
        """Read the numbers of the cuts, and begin to round them."""
        wait(self.under_way)
        memory, _ = self._buffer.read(root, [cut.piece.source for cut in cuts], checksums=False)
        pairs = zip(cuts, memory, strict=True)
        self.under_way = [
            begun(pool, _round_to, *part) for cut, numbers in pairs for part in _parts_of(cut, numbers.ctypes.data)
        ]


def _rounding_threads() -> int:
    return min(_MOST_ROUNDING_THREADS, len(os.sched_getaffinity(0)))


def _parts_of(cut: Cut, address: int) -> Iterator[tuple[Cut, int]]:
    """Yield what one thread rounds at a time, with the address of its numbers."""
    for (part,) in cuts_of([cut], most_bytes=_ROUNDED_BYTES):
        yield part, address + part.piece.offset - cut.piece.offset


def _round_to(cut: Cut, address: int) -> None:
    native.round_memory(address=address, target=cut.address, numel=cut.piece.numel, dtype=cut.piece.rounded_to)


def _completed(
    digests: bytes, others: npt.NDArray[np.bool_], pieces: Sequence[Piece], addresses: npt.NDArray[np.uint64]
) -> bytes:
    """Return the checksums of all pieces in order: `digests` has those of all but the `others`, which are in memory."""
    found = np.empty((len(pieces), CHECKSUM_BYTES), np.uint8)
    found[~others] = np.frombuffer(digests, np.uint8).reshape(-1, CHECKSUM_BYTES)
    nbytes = np.array([piece.nbytes for piece in pieces], np.uint64)
    computed = native.checksum_memory(addresses=addresses[others], nbytes=nbytes[others])
    found[others] = np.frombuffer(computed, np.uint8).reshape(-1, CHECKSUM_BYTES)
    return found.tobytes()


def _read_raw(root: Path, pieces: Sequence[Piece], targets: npt.NDArray[np.uint64], *, checksums: bool) -> bytes:
    """Read pieces that are in data files as they are, wherever these are; return the checksums."""
    files = {piece.file for piece in pieces}
    packed = only_packed(root, files)
    was_stale = False
    while True:
        try:
            return _read_forms(root, pieces, targets, packed, checksums=checksums)
        except FileNotFoundError:
            # A data file that was there a moment ago has given way to its image.
            before, packed = packed, only_packed(root, files)
            if packed == before:
                raise
        except OSError as error:
            if error.errno != errno.ESTALE or was_stale:
                raise
            was_stale, packed = True, only_packed(root, files)


def _read_forms(
    root: Path,
    pieces: Sequence[Piece],
    addresses: npt.NDArray[np.uint64],
    packed: Collection[str],
    *,
    checksums: bool,
) -> bytes:
    """Read pieces of data files, and of those that are packed from their images; return the checksums."""
    if not packed:
        return _read_files(root, pieces, addresses, checksums=checksums)
    is_packed = np.array([piece.file in packed for piece in pieces])
    plain = [piece for piece, image in zip(pieces, is_packed, strict=True) if not image]
    targets = zip(pieces, addresses.tolist(), strict=True)
    read_images(
        root, (Wanted(piece.file, piece.offset, piece.nbytes, at) for piece, at in targets if piece.file in packed)
    )
    digests = _read_files(root, plain, addresses[~is_packed], checksums=checksums)
    return _completed(digests, is_packed, pieces, addresses) if checksums else b""


def _read_files(root: Path, pieces: Sequence[Piece], addresses: npt.NDArray[np.uint64], *, checksums: bool) -> bytes:
    files = sorted({piece.file for piece in pieces})
    index = {file: i for i, file in enumerate(files)}
    return native.read(
        [str(root / file) for file in files],
        file_index=np.array([index[piece.file] for piece in pieces], np.uint32),
        offsets=np.array([piece.offset for piece in pieces], np.uint64),
        addresses=addresses,
        nbytes=np.array([piece.nbytes for piece in pieces], np.uint64),
        checksums=checksums,
    )


def read_verified(root: Path, reads: Sequence[tuple[Extent, int]]) -> None:
    """Read whole extents, each to its address, and compare their checksums.

    CorruptError names file, tensor and offset of the first extent that can't be read or whose bytes differ. The memory
    may hold anything by then.
    """
    extents = [extent for extent, _ in reads]
    try:
        checksums = read_to(root, [piece_of(extent) for extent in extents], [address for _, address in reads])
    except OSError as error:
        raise _unreadable(root, *(_first_unreadable(root, reads) or (extents[0], error))) from error
    for extent, actual in mismatches(extents, checksums):
        raise CorruptError(
            f"{_place(root, extent)}: the manifest's checksum is {extent.checksum.hex()}, the bytes give "
            f"{actual.hex()}: the file is damaged; restore another step"
        )


def read_unverified(root: Path, extent: Extent, address: int, *, skip_bytes: int, nbytes: int) -> None:
    """Read `nbytes` of an extent from byte `skip_bytes` on; a part of an extent has no checksum to compare.

    CorruptError names file, tensor and offset when it can't be read.
    """
    try:
        read_to(root, [piece_of(extent, skip_bytes=skip_bytes, nbytes=nbytes)], [address])
    except OSError as error:
        raise _unreadable(root, extent, error) from error


def mismatches(extents: Sequence[Extent], checksums: bytes) -> Iterator[tuple[Extent, bytes]]:
    """Yield every extent whose bytes have another checksum than its manifest says, with that checksum."""
    for i, extent in enumerate(extents):
        actual = checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]
        if actual != extent.checksum:
            yield extent, actual


def _place(root: Path, extent: Extent) -> str:
    made = f", rounded from {extent.base}" if extent.is_rounded else ""
    return f"{root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}{made}"


def _unreadable(root: Path, extent: Extent, error: OSError) -> CorruptError:
    return CorruptError(f"{_place(root, extent)}: {error.strerror}: the file is damaged, truncated or missing")


def _first_unreadable(root: Path, reads: Sequence[tuple[Extent, int]]) -> tuple[Extent, OSError] | None:
    """Return the first extent that can't be read by itself: the error of a whole batch does not say which it was."""
    for extent, address in reads:
        try:
            read_to(root, [piece_of(extent)], [address])
        except OSError as error:
            return extent, error
    return None
