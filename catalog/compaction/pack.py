"""Packs one data file, so that at every moment, and after a crash at any, all of its bytes are there.

1. Each extent is read and compared with the checksum of its manifest: what is damaged is never packed.
2. The image is written under a temporary name and made durable (fsync).
3. It is unpacked again, all of it, and compared with the same checksums.
4. It gets its name: rename(2), fsync of the folder.
5. The data file is removed, while nobody reads the checkpoint, and the folder is made durable again.

A crash leaves the data file, or both, or the image. Where both are there the data file counts, and the next compaction
goes on from step 3.

A batch of the data file is in memory at a time, as much of the bases, and what both are packed to: an extent that is
larger comes in parts, and is compared with its checksum at its end, before the image has its name.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

import native
from catalog.disk.durable import publish, sync_dir, temporary_path
from catalog.encoding.planes import needs_base, packed
from catalog.errors import CorruptError, FormatError, SetupError
from catalog.format.dtypes import DTYPES
from catalog.format.manifest import Manifest
from catalog.format.packed_file import MAGIC, Base, Block, encode_end, read_packed_file
from catalog.paths import HistoryPaths, packed_file
from catalog.read.packed_bytes import Wanted, unpack_image
from catalog.read.pieces import Piece, piece_of
from catalog.read.pins import alone_with
from catalog.read.stored_bytes import Buffer, ReadBuffer, batches
from catalog.records import CHECKSUM_BYTES, CheckpointRef, Extent

__all__ = ["BLOCK_BYTES", "Bases", "bases_in", "bytes_with_base", "drop_data_files", "pack_data_file"]

BLOCK_BYTES = 1 << 20
"""Whoever reads a few elements unpacks a whole block; smaller ones would gain less."""

_BATCH_BYTES = 64 << 20

_Key: TypeAlias = tuple[str, str, int, int, str]

Bases: TypeAlias = Mapping[_Key, Extent]
"""The extents that others may be packed against, by what they hold."""


class _Part(NamedTuple):
    """The bytes `[skip, skip + nbytes)` of an extent: all of them, or a batch of a larger one."""

    extent: Extent
    skip: int
    nbytes: int

    @property
    def place(self) -> Piece:
        return piece_of(self.extent, skip_bytes=self.skip, nbytes=self.nbytes)


class _RawBlock(NamedTuple):
    """A part of an extent that becomes a block, with the bytes of its base."""

    raw: memoryview
    begin: int
    itemsize: int
    base: memoryview | None
    base_file: str
    base_offset: int


def bases_in(manifest: Manifest, *, files: frozenset[str]) -> Bases:
    """Return the extents of a rank's part of a key frame whose bytes are in one of `files`."""
    return {_key(extent): extent for extent in _as_they_are(manifest) if extent.nbytes and extent.file in files}


def bytes_with_base(manifest: Manifest, bases: Bases) -> int:
    """Return how many of the bytes of a part's data file can be packed against a base."""
    own = (extent for extent in _as_they_are(manifest) if extent.file == manifest.file)
    return sum(extent.nbytes for extent in own if _key(extent) in bases)


def _as_they_are(manifest: Manifest) -> Iterator[Extent]:
    """Yield the extents whose bytes are in a file as they are: what is rounded is made of these."""
    return (extent for extent in manifest.extents() if not extent.is_rounded)


def _key(extent: Extent) -> _Key:
    return extent.kind, extent.name, extent.start, extent.numel, extent.dtype


def pack_data_file(
    paths: HistoryPaths,
    manifest: Manifest,
    *,
    bases: Bases,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Put the packed image of a part's data file beside it, durable and checked; the data file stays.

    It takes memory for three batches of 64 MiB, and for a few blocks in each thread, however large an extent is.

    An image that is there already, and needs no more than `bases`, is only checked. CorruptError when the data file, or
    a base, is damaged, or when what was written does not give the same bytes again; OSError when it can't be written.
    Neither leaves anything behind.
    """
    final = paths.root / packed_file(manifest.file)
    if _is_whole(paths.root, final, manifest, bases):
        # Whoever published it may have died before its name was durable.
        sync_dir(final.parent)
        return
    tmp = temporary_path(final)
    try:
        with tmp.open("xb") as out:
            _write(paths.root, out, manifest, bases, workers, progress)
            out.flush()
            os.fsync(out.fileno())
            # What is compared is what the disk has, not what memory still knows of it.
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _compare(paths.root, tmp, manifest)
    except (Exception, KeyboardInterrupt):
        tmp.unlink(missing_ok=True)
        raise
    publish(tmp, final)


def drop_data_files(paths: HistoryPaths, ref: CheckpointRef, manifests: Sequence[Manifest]) -> None:
    """Remove the data files of a checkpoint, whose images `pack_data_file` has just made or checked. SetupError, and
    nothing is removed, when somebody reads the checkpoint."""
    with alone_with(paths, ref) as alone:
        if not alone:
            raise SetupError(f"checkpoint {ref}: a reader has it open: its data files stay beside their images")
        for manifest in manifests:
            (paths.root / manifest.file).unlink(missing_ok=True)
        sync_dir(paths.step_dir(ref.run, ref.step))


def _is_whole(root: Path, path: Path, manifest: Manifest, bases: Bases) -> bool:
    """Return whether there is an image that gives the bytes of the manifest and needs no other bases."""
    try:
        about = read_packed_file(path, file=manifest.file)
        if not {*about.bases} <= {extent.file for extent in bases.values()}:
            return False
        _compare(root, path, manifest)
    except (FormatError, OSError):
        return False
    return True


def _write(
    root: Path,
    out: BinaryIO,
    manifest: Manifest,
    bases: Bases,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    at = out.write(MAGIC)
    blocks = []
    with ThreadPoolExecutor(workers, thread_name_prefix="dshistory-pack") as pool:
        raw, based = _Reader(root), _Reader(root)
        for batch in _own_batches(manifest):
            pieces = list(_raw_blocks(batch, bases, raw, based))
            for piece, content in zip(pieces, pool.map(_packed, pieces), strict=True):
                out.write(content)
                blocks.append(_block(piece, content, at))
                at += len(content)
            progress(sum(part.nbytes for part in batch))
    out.write(
        encode_end(blocks, run=manifest.run, step=manifest.step, rank=manifest.rank, data_bytes=manifest.data_bytes)
    )


def _own_batches(manifest: Manifest) -> Iterator[list[_Part]]:
    """Yield the extents of the part's own file in the order of their bytes, of which none is left out."""
    own = (extent for extent in _as_they_are(manifest) if extent.file == manifest.file)
    parts = (
        _Part(extent, skip, min(_BATCH_BYTES, extent.nbytes - skip))
        for extent in sorted(own, key=lambda extent: extent.offset)
        for skip in range(0, extent.nbytes, _BATCH_BYTES)
    )
    yield from batches(parts, most_bytes=_BATCH_BYTES)


def _raw_blocks(batch: list[_Part], bases: Bases, raw: "_Reader", based: "_Reader") -> Iterator[_RawBlock]:
    """Yield the blocks of some extents, whose bytes and whose bases' bytes are read and compared."""
    others = {part: part._replace(extent=bases[_key(part.extent)]) for part in batch if _key(part.extent) in bases}
    own = raw.read(batch)
    base = based.read(others.values())
    for part in batch:
        other = others.get(part)
        for at in range(0, part.nbytes, BLOCK_BYTES):
            within = slice(at, min(at + BLOCK_BYTES, part.nbytes))
            yield _RawBlock(
                own[part.place].data[within],
                part.extent.offset + part.skip + at,
                DTYPES[part.extent.dtype],
                None if other is None else base[other.place].data[within],
                "" if other is None else other.extent.file,
                0 if other is None else other.extent.offset + other.skip + at,
            )


class _Reader:
    """Reads extents in parts, in order, and raises CorruptError at the end of one that is damaged."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._buffer = ReadBuffer()
        self._checksums = _Checksums()

    def read(self, parts: Iterable[_Part]) -> dict[Piece, Buffer]:
        """Return the bytes of parts by their place, which hold until the next call: several may name the same."""
        by_place = {part.place: part for part in parts}
        places = sorted(by_place)
        if not places:
            return {}
        memory, checksums = self._buffer.read(self._root, places)
        for extent, actual in self._checksums.differing([by_place[place] for place in places], memory, checksums):
            raise CorruptError(
                f"{self._root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: the manifest's "
                f"checksum is {extent.checksum.hex()}, the bytes give {actual.hex()}: damaged, and therefore not packed"
            )
        return dict(zip(places, memory, strict=True))


class _Checksums:
    """Compares extents that come in parts, in order, with the checksums of their manifests. All parts of an extent but
    the last are batches by themselves, so one extent at a time is not at its end."""

    def __init__(self) -> None:
        self._running = native.RunningChecksum()

    def differing(
        self, parts: Sequence[_Part], memory: Sequence[Buffer], checksums: bytes
    ) -> Iterator[tuple[Extent, bytes]]:
        """Yield every extent that ends here and has another checksum than its manifest says, with that checksum;
        `checksums` are those of the parts."""
        for i, (part, content) in enumerate(zip(parts, memory, strict=True)):
            actual = checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]
            if part.nbytes < part.extent.nbytes:
                self._running.add(content)
                if part.skip + part.nbytes < part.extent.nbytes:
                    continue
                actual, self._running = self._running.end(), native.RunningChecksum()
            if actual != part.extent.checksum:
                yield part.extent, actual


def _packed(piece: _RawBlock) -> bytes:
    return packed(piece.raw, itemsize=piece.itemsize, base=piece.base)


def _block(piece: _RawBlock, content: bytes, at: int) -> Block:
    base = None
    if piece.base is not None and needs_base(content):
        base = Base(piece.base_file, piece.base_offset, native.checksum(piece.base))
    return Block(piece.begin, piece.raw.nbytes, at, len(content), native.checksum(content), base)


def _compare(root: Path, path: Path, manifest: Manifest) -> None:
    """Raise CorruptError unless the image at `path` gives the bytes of every extent of the part's own file."""
    memory, checked = ReadBuffer(), _Checksums()
    for batch in _own_batches(manifest):
        places = [part.place for part in batch]
        found, addresses = memory.place(places)
        wanted = [Wanted(*place[:3], address) for place, address in zip(places, addresses, strict=True)]
        unpack_image(root, path, wanted)
        checksums = native.checksum_memory(
            addresses=np.array(addresses, np.uint64),
            nbytes=np.array([part.nbytes for part in batch], np.uint64),
        )
        for extent, actual in checked.differing(batch, found, checksums):
            raise CorruptError(
                f"{path}: {extent.kind} {extent.name!r}: the manifest's checksum is {extent.checksum.hex()}, what was "
                f"packed gives {actual.hex()}: nothing was changed; check this machine's memory and disk"
            )
