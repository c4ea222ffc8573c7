"""Packs one data file, so that at every moment, and after a crash at any, all of its bytes are there.

1. Its extents are read, and packed block by block under a temporary name. Each block is unpacked again at once. Of
   every extent both what was read and what was unpacked must have the checksum of its manifest: what is damaged is
   never packed, and what does not give the same bytes never takes their place.
2. The image is made durable (fsync), and read back from the disk: its table says what was packed, and every block has
   its checksum.
3. It gets its name: rename(2), fsync of the folder.
4. The data file is removed, while nobody reads the checkpoint, and the folder is made durable again.

A crash leaves the data file, or both, or the image. Where both are there the data file counts, and the next compaction
unpacks the image, all of it, and goes on from step 4.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import native
from catalog.access.pins import alone_with
from catalog.compaction.spans import Span, SpanReader, SpanSums, cut
from catalog.data_files.data_files import image_of
from catalog.data_files.needed_files import NeededFile, bases_of, missing_file
from catalog.data_files.packed_bytes import Wanted, unpack_image
from catalog.data_files.pieces import Piece
from catalog.data_files.stored_bytes import Buffer, ReadBuffer
from catalog.disk.durable import publish, publish_exclusive, sync_dir, temporary_path
from catalog.encoding.planes import needs_base, packed, unpacked
from catalog.errors import CorruptError, FormatError, SetupError
from catalog.format.dtypes import DTYPES
from catalog.format.manifest import Manifest
from catalog.format.packed_file import MAGIC, Base, Block, encode_end, read_packed_file
from catalog.paths import HistoryPaths, packed_file
from catalog.records import CHECKSUM_BYTES, CheckpointRef, Extent

__all__ = ["Bases", "BeingReadError", "bases_in", "bytes_with_base", "drop_data_files", "drop_images", "pack_data_file"]

_READ_BACK_BYTES = 16 << 20

_Key: TypeAlias = tuple[str, str, int, int, str]

Bases: TypeAlias = Mapping[_Key, Extent]
"""The extents that others may be packed against, by what they hold."""


class BeingReadError(SetupError):
    """Somebody reads a checkpoint, so its data files can't go yet."""


class _RawBlock(NamedTuple):
    """A part of an extent that becomes a block: its bytes, those of its base, and memory for what is unpacked again."""

    raw: memoryview
    again: memoryview
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
    alone: bool,
    workers: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Put the packed image of a part's data file beside it, durable and checked; the data file stays.

    alone: whether nobody else packs it, or ever can while this is called: only then another image is replaced
    workers: threads that pack

    An image that is there already, and needs no more than `bases`, is only checked. CorruptError when the data file, or
    a base, is damaged, or when what was written does not give the same bytes again; OSError when it can't be written.
    Neither leaves anything behind. Takes five times 16 MiB of memory, whatever the size of a tensor.
    """
    final = paths.root / packed_file(manifest.file)
    if _is_whole(paths.root, final, manifest, bases):
        # Whoever published it may have died before its name was durable.
        sync_dir(final.parent)
        return
    tmp = temporary_path(final)
    try:
        with tmp.open("xb") as out:
            with ThreadPoolExecutor(workers, thread_name_prefix="dshistory-pack") as pool:
                blocks = _Packing(paths.root, manifest, bases, pool).write(out, progress)
            out.flush()
            os.fsync(out.fileno())
            # What is read back is what the disk has, not what memory still knows of it.
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _read_back(paths.root, tmp, manifest, blocks)
    except (Exception, KeyboardInterrupt):
        tmp.unlink(missing_ok=True)
        raise
    if alone:
        publish(tmp, final)
    elif not publish_exclusive(tmp, final):
        raise SetupError(f"{final}: is there already, and needs other files, or is damaged: it stays as it is")


def drop_data_files(paths: HistoryPaths, ref: CheckpointRef, files: Sequence[str]) -> None:
    """Remove the data files of a checkpoint, whose images `pack_data_file` has just made or checked. Nothing is
    removed, and it is a BeingReadError, when somebody reads the checkpoint, a SetupError when what an image was packed
    against is not there any more, or needs others itself: nobody may remove a checkpoint of the run meanwhile."""
    with alone_with(paths, ref) as alone:
        if not alone:
            raise BeingReadError(f"checkpoint {ref}: a reader has it open: its data files stay beside their images")
        for base in sorted({base for file in files for base in image_of(paths.root, file).bases}):
            problem = missing_file(paths, [NeededFile(base, 0)])
            if problem:
                raise SetupError(f"checkpoint {ref}: its image {problem}: its data files stay")
            for further in bases_of(paths, base):
                raise SetupError(
                    f"checkpoint {ref}: its image was packed against {base}, which needs {further} itself, and no "
                    "reader follows two links: its data files stay"
                )
        for file in files:
            (paths.root / file).unlink(missing_ok=True)
        sync_dir(paths.step_dir(ref.run, ref.step))


def drop_images(paths: HistoryPaths, ref: CheckpointRef, files: Sequence[str]) -> None:
    """Remove the images of data files that are all still there; of others the image stays."""
    for file in files:
        if (paths.root / file).exists():
            (paths.root / packed_file(file)).unlink(missing_ok=True)
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


class _Batch(NamedTuple):
    """Some spans, and their bytes; those of them that have a base, by their number, and the bytes of these."""

    spans: Sequence[Span]
    raw: Sequence[Buffer]
    based: Mapping[int, Span]
    base: Sequence[Buffer]


class _Packing:
    """The packing of one data file: reads it and its bases, and compares all that was read and made."""

    def __init__(self, root: Path, manifest: Manifest, bases: Bases, pool: Executor) -> None:
        self._root = root
        self._manifest = manifest
        self._bases = bases
        self._pool = pool
        self._again = ReadBuffer()
        self._raw_sums, self._base_sums = SpanSums(_damaged(root)), SpanSums(_damaged(root))
        self._again_sums = SpanSums(_other_bytes(root / packed_file(manifest.file)))

    def write(self, out: BinaryIO, progress: Callable[[int], None]) -> list[Block]:
        """Write the image, and return its blocks."""
        manifest = self._manifest
        at = out.write(MAGIC)
        blocks = []
        for batch in self._batches():
            for content, block in self._packed(batch):
                out.write(content)
                blocks.append(block._replace(offset=at))
                at += len(content)
            progress(sum(span.nbytes for span in batch.spans))
        out.write(
            encode_end(blocks, run=manifest.run, step=manifest.step, rank=manifest.rank, data_bytes=manifest.data_bytes)
        )
        return blocks

    def _batches(self) -> Iterator[_Batch]:
        """Yield the data file in batches; the next one is read while one is packed."""
        readers = itertools.cycle([(SpanReader(self._root), SpanReader(self._root)) for _ in range(2)])
        with ThreadPoolExecutor(1, thread_name_prefix="dshistory-pack-read") as ahead:
            ready: Future[_Batch] | None = None
            for spans, (raw, base) in zip(cut(_own_extents(self._manifest)), readers, strict=False):
                coming = ahead.submit(self._read, spans, raw, base)
                if ready is not None:
                    yield ready.result()
                ready = coming
            if ready is not None:
                yield ready.result()

    def _read(self, spans: Sequence[Span], raw: SpanReader, base: SpanReader) -> _Batch:
        found = {i: self._bases.get(_key(span.extent)) for i, span in enumerate(spans)}
        based = {i: spans[i]._replace(extent=extent) for i, extent in found.items() if extent is not None}
        return _Batch(spans, raw.read(spans), based, base.read(list(based.values())))

    def _packed(self, batch: _Batch) -> Iterator[tuple[bytes, Block]]:
        """Yield what is written for each block of a batch; then compare it."""
        again, _ = self._again.place([span.place for span in batch.spans])
        base = dict(zip(batch.based, batch.base, strict=True))
        spans = enumerate(zip(batch.spans, batch.raw, again, strict=True))
        pieces = (piece for i, span in spans for piece in _pieces(*span, batch.based.get(i), base.get(i)))
        yield from self._pool.map(_packed, pieces)
        # Last, so that nothing can have changed in memory between the packing and the look.
        self._raw_sums.add(batch.spans, batch.raw)
        self._base_sums.add(batch.based.values(), batch.base)
        self._again_sums.add(batch.spans, again)


def _pieces(
    span: Span, raw: Buffer, again: Buffer, base: Span | None, base_bytes: Buffer | None
) -> Iterator[_RawBlock]:
    file, offset = ("", 0) if base is None else base.place[:2]
    for part in span.blocks():
        yield _RawBlock(
            raw[part].data,
            again[part].data,
            span.place.offset + part.start,
            DTYPES[span.extent.dtype],
            None if base_bytes is None else base_bytes[part].data,
            file,
            offset + part.start,
        )


def _packed(piece: _RawBlock) -> tuple[bytes, Block]:
    """Return a block, and what the table says of it but its place; write what it gives again to its memory."""
    content = packed(piece.raw, itemsize=piece.itemsize, base=piece.base)
    # Before it is unpacked, so that bytes that change in memory from here on are found.
    checksum = native.checksum(content)
    unpacked(content, base=piece.base, into=piece.again)
    base = None
    if piece.base is not None and needs_base(content):
        base = Base(piece.base_file, piece.base_offset, native.checksum(piece.base))
    return content, Block(piece.begin, piece.raw.nbytes, 0, len(content), checksum, base)


def _own_extents(manifest: Manifest) -> list[Extent]:
    """Return the extents of the part's own file in the order of their bytes, of which none is left out."""
    own = (extent for extent in _as_they_are(manifest) if extent.file == manifest.file and extent.nbytes)
    return sorted(own, key=lambda extent: extent.offset)


def _read_back(root: Path, path: Path, manifest: Manifest, blocks: Sequence[Block]) -> None:
    """Raise CorruptError unless the disk has the image that was written."""
    if list(read_packed_file(path, file=manifest.file).blocks()) != list(blocks):
        raise CorruptError(f"{path}: the table that was read back is not the one that was written: check this disk")
    memory = ReadBuffer()
    for batch in _batches(blocks):
        pieces = [Piece(str(path.relative_to(root)), block.offset, block.stored) for block in batch]
        _, checksums = memory.read(root, pieces)
        for i, block in enumerate(batch):
            actual = checksums[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]
            if actual != block.checksum:
                raise CorruptError(
                    f"{path}: bytes {block.offset} to {block.offset + block.stored}: written with the checksum "
                    f"{block.checksum.hex()}, read back with {actual.hex()}: nothing was changed; check this machine's "
                    "memory and disk"
                )


def _batches(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        batch.append(block)
        nbytes += block.stored
        if nbytes >= _READ_BACK_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _compare(root: Path, path: Path, manifest: Manifest) -> None:
    """Raise CorruptError unless the image at `path` gives the bytes of every extent of the part's own file."""
    memory, sums = ReadBuffer(), SpanSums(_other_bytes(path))
    for spans in cut(_own_extents(manifest)):
        places = [span.place for span in spans]
        found, addresses = memory.place(places)
        wanted = [Wanted(*place[:3], address) for place, address in zip(places, addresses, strict=True)]
        unpack_image(root, path, wanted)
        sums.add(spans, found)


def _damaged(root: Path) -> Callable[[Extent, str], CorruptError]:
    return lambda extent, found: CorruptError(
        f"{root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: {found}: damaged, and "
        "therefore not packed"
    )


def _other_bytes(path: Path) -> Callable[[Extent, str], CorruptError]:
    return lambda extent, found: CorruptError(
        f"{path}: {extent.kind} {extent.name!r}: what was packed gives other bytes: {found}: nothing was changed; "
        "check this machine's memory and disk"
    )
