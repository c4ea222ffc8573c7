"""Packed files: an image of a data file that takes less disk, and from which every byte of it can be made again.

    8 bytes             DSHPACK1
    the blocks          each a packed block (`catalog.encoding.planes`), one after the other
    the table           a checked Parquet file: one row for each block, in order
    8 bytes             how many bytes the table has
    8 bytes             DSHPACK1

A block stands for a range of the data file. The ranges follow each other from its first byte to its last, so manifests
and markers, which name places in the data file, mean the same bytes as before. A block may need a base: a range of
another data file, which must be the very bytes that it was packed against. Bases have no bases, so a chain has one
link. Every byte of a packed file has a checksum, or only one value that it may have.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.disk.checked_parquet import MAX_FILE_BYTES, decode_checked, encode_checked
from catalog.disk.regular_file import open_regular
from catalog.encoding.planes import MAX_HEAD_BYTES
from catalog.errors import CorruptError, FormatError
from catalog.format.extents import MAX_FIGURE
from catalog.paths import parse_data_file
from catalog.records import CHECKSUM_BYTES

__all__ = ["MAGIC", "MAX_BLOCK_BYTES", "SCHEMA", "Base", "Block", "PackedFile", "encode_end", "read_packed_file"]

VERSION: Final = "1"
MAGIC: Final = b"DSHPACK1"
_END_BYTES: Final = 8 + len(MAGIC)
MAX_BLOCK_BYTES: Final = 4 << 20
"""The largest range of a block. Constant planes let a few bytes stand for it, and for the one byte that somebody wants
of a block all of it is made, and all of its base: so a hostile table can make a reader take little more memory than
what it asks for."""

_CACHED: Final = 256

SCHEMA: Final = pa.schema(
    [
        pa.field("begin", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("stored", pa.int64(), nullable=False),
        pa.field("checksum", pa.binary(CHECKSUM_BYTES), nullable=False),
        pa.field("base", pa.string(), nullable=True),
        pa.field("base_offset", pa.int64(), nullable=True),
        pa.field("base_checksum", pa.binary(CHECKSUM_BYTES), nullable=True),
    ]
)
"""One row for each block: the range `[begin, begin + nbytes)` of the data file is made of `stored` bytes at `offset` of
the packed file, whose XXH3-128 is `checksum`; and of `nbytes` bytes at `base_offset` of the data file `base`, whose
XXH3-128 is `base_checksum`, or of nothing else."""


class Base(NamedTuple):
    """A range of another data file that a block was packed against; it is as long as the block's own range."""

    file: str
    offset: int
    checksum: bytes


class Block(NamedTuple):
    """One block: its range of the data file, its place in the packed file, and what it needs."""

    begin: int
    nbytes: int
    offset: int
    stored: int
    checksum: bytes
    base: Base | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedFile:
    """A packed file whose table is checked. `file` is the data file of which it is the image, `data_bytes` its size,
    and `bases` are the data files that it needs."""

    path: Path
    file: str
    data_bytes: int
    begins: npt.NDArray[np.int64]
    table: pa.Table
    bases: tuple[str, ...]

    def covering(self, offset: int, nbytes: int) -> Sequence[Block]:
        """Return the blocks that have a byte of a range of the data file, in order. OSError when the range is not in
        it, as a read beyond the end of a file."""
        if not 0 <= offset <= offset + nbytes <= self.data_bytes:
            raise OSError(5, f"bytes {offset} to {offset + nbytes} of a file of {self.data_bytes}", str(self.path))
        if not nbytes:
            return ()
        first = int(np.searchsorted(self.begins, offset, side="right")) - 1
        last = int(np.searchsorted(self.begins, offset + nbytes, side="left"))
        return [_block(row) for row in self.table.slice(first, last - first).to_pylist()]

    def blocks(self) -> Sequence[Block]:
        """Return all blocks, in order."""
        return self.covering(0, self.data_bytes)


def _block(row: dict[str, object]) -> Block:
    base = None if row["base"] is None else Base(row["base"], row["base_offset"], row["base_checksum"])  # type: ignore[arg-type]
    return Block(row["begin"], row["nbytes"], row["offset"], row["stored"], row["checksum"], base)  # type: ignore[arg-type]


def encode_end(blocks: Sequence[Block], *, run: str, step: int, rank: int, data_bytes: int) -> bytes:
    """Return what follows the blocks of a packed file: its table, and how long that is."""
    none = (None, None, None)
    rows = [(*block[:5], *(block.base or none)) for block in blocks]
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    table = pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )
    encoded = encode_checked(table, metadata=_metadata(run, step, rank, data_bytes))
    return encoded + len(encoded).to_bytes(8, "little") + MAGIC


def read_packed_file(path: Path, *, file: str) -> PackedFile:
    """Read the table of the packed image of the data file `file`, and check it; its blocks are not read. A file that
    was read before and is unchanged is not read again.

    CorruptError when the table is damaged; FormatError when the file is of another version or data file, or breaks a
    rule of the format; OSError when it can't be opened (FileNotFoundError when there is none).
    """
    with open_regular(path) as stream:
        facts = os.fstat(stream.fileno())
        key = (str(path), file, facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        return _read(*key)


@functools.lru_cache(maxsize=_CACHED)
def _read(path: str, file: str, device: int, inode: int, size: int, changed_ns: int) -> PackedFile:
    with open_regular(Path(path)) as stream:
        return _parse(stream, path=Path(path), file=file)


def _parse(stream: BinaryIO, *, path: Path, file: str) -> PackedFile:
    size = os.fstat(stream.fileno()).st_size
    if size < len(MAGIC) + _END_BYTES:
        raise FormatError(f"{path}: {size} bytes, too short for a packed file: it was cut off")
    begin = stream.read(len(MAGIC))
    stream.seek(size - _END_BYTES)
    end = stream.read(_END_BYTES)
    if begin != MAGIC or end[8:] != MAGIC:
        raise CorruptError(f"{path}: is not a packed file of version {VERSION}, or was damaged at its begin or end")
    length = int.from_bytes(end[:8], "little")
    at = size - _END_BYTES - length
    if length > MAX_FILE_BYTES or at < len(MAGIC):
        raise CorruptError(f"{path}: the table's length is {length} in a file of {size} bytes: it was damaged")
    stream.seek(at)
    table, metadata = decode_checked(stream.read(length), schema=SCHEMA, file=str(path))
    parsed = parse_data_file(file)
    assert parsed is not None
    data_bytes = metadata.get("data_bytes", "")
    if not data_bytes.isascii() or not data_bytes.isdigit() or int(data_bytes) >= MAX_FIGURE:
        raise FormatError(f"{path}: field data_bytes: {data_bytes!r} is not a number of bytes")
    if metadata != _metadata(*parsed, int(data_bytes)):
        raise FormatError(
            f"{path}: the fields are {metadata}, the image of {file} has {_metadata(*parsed, int(data_bytes))}"
        )
    _check(table, path=path, file=file, data_bytes=int(data_bytes), end=at)
    bases = tuple(sorted(name for name in table["base"].unique().to_pylist() if name is not None))
    begins = table["begin"].to_numpy()
    return PackedFile(path, file, int(data_bytes), begins, table, bases)


def _check(table: pa.Table, *, path: Path, file: str, data_bytes: int, end: int) -> None:
    """Raise FormatError unless the ranges cover the data file, and the blocks the packed file, without hole or overlap,
    and each base is a range of another data file."""
    # First, so that no sum below is larger than a number may be.
    lengths = table["nbytes"].to_numpy()
    if lengths.size and lengths.max() > MAX_BLOCK_BYTES:
        raise FormatError(f"{path}: column nbytes: a block of {lengths.max()} bytes, {MAX_BLOCK_BYTES} are allowed")
    stored = table["stored"].to_numpy()
    if (stored > lengths + MAX_HEAD_BYTES).any():
        raise FormatError(f"{path}: column stored: a block takes more than its own bytes and {MAX_HEAD_BYTES}")
    _check_cover(table, "begin", "nbytes", first=0, last=data_bytes, path=path)
    _check_cover(table, "offset", "stored", first=len(MAGIC), last=end, path=path)
    nulls = [table[name].is_null() for name in ("base", "base_offset", "base_checksum")]
    if not nulls[0].equals(nulls[1]) or not nulls[0].equals(nulls[2]):
        raise FormatError(f"{path}: a block has half a base: base, base_offset and base_checksum belong together")
    for name in table["base"].unique().to_pylist():
        if name is not None and (parse_data_file(name) is None or name == file):
            raise FormatError(f"{path}: column base: {name[:200]!r} is no other data file of this history")
    offsets = table["base_offset"].drop_null().to_numpy()
    if offsets.size and not 0 <= offsets.min() <= offsets.max() < MAX_FIGURE:
        raise FormatError(f"{path}: column base_offset: is out of range")


def _check_cover(table: pa.Table, begin: str, length: str, *, first: int, last: int, path: Path) -> None:
    begins, lengths = table[begin].to_numpy(), table[length].to_numpy()
    if lengths.size and not 0 < lengths.min() <= lengths.max() < MAX_FIGURE:
        raise FormatError(f"{path}: column {length}: is out of range")
    ends = first + np.cumsum(lengths)
    expected = np.concatenate([[first], ends])
    if not np.array_equal(np.append(begins, last), expected):
        raise FormatError(f"{path}: columns {begin}, {length}: do not cover the bytes {first} to {last} once each")


def _metadata(run: str, step: int, rank: int, data_bytes: int) -> dict[str, str]:
    return {
        "dshistory.packed": VERSION,
        "run": run,
        "step": str(step),
        "rank": str(rank),
        "data_bytes": str(data_bytes),
    }
