"""The ends of a data file: the objects behind the planned bytes, the header before them, and the manifest rows of it
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pyarrow as pa
import torch

import native
from capture.dtypes import dtype_name
from capture.objects import EncodedObject
from capture.plan import Plan
from catalog.extents import extent_table
from catalog.header import Entry, encode_header, entries_json
from catalog.records import Extent, Placement

__all__ = ["PlacedObject", "Tail", "data_file_extents", "data_file_header", "make_tail", "object_entries"]

_HUGE = 1 << 50
"""No offset has more digits."""


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """An encoded object and where it belongs."""

    encoded: EncodedObject
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    placement: Placement
    data: bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the planned bytes: `data` ends aligned; entries are relative to data_start, rows lack only their
    file.
    """

    data: bytes
    entries: tuple[Entry, ...]
    extents: tuple[Extent, ...]


def object_entries(objects: Sequence[PlacedObject]) -> list[Entry]:
    """Entries as large as the objects' real ones: what the header must reserve."""
    entries = []
    for placed in objects:
        for name, tensor in placed.encoded.tensors.items():
            dtype = dtype_name(tensor.dtype, what=name)
            entries.append(Entry(f"object_tensor/{name}", dtype, tuple(tensor.shape), _HUGE, _HUGE))
        shape = (len(placed.encoded.json),)
        entries.append(Entry(f"object/{placed.encoded.name}", "U8", shape, _HUGE, _HUGE))
    return entries


def make_tail(objects: Sequence[PlacedObject], plan: Plan, *, file: str) -> Tail:
    """Lay the objects out behind the planned bytes: their tensors first, by falling item size, then the JSON trees,
    then padding.
    """
    at = plan.data_end
    chunks: list[bytes] = []
    entries: list[Entry] = []
    extents: list[Extent] = []
    pieces = _pieces(objects)
    end = at + sum(len(piece.data) for piece in pieces)
    pad = -end % plan.align
    if pad:
        pieces.append(_Piece("__pad__.tail", "pad", "U8", (pad,), "rank_local", bytes(pad)))
    for piece in pieces:
        key = piece.name if piece.kind == "pad" else f"{piece.kind}/{piece.name}"
        begin = at - plan.data_start
        entries.append(Entry(key, piece.dtype, piece.shape, begin, begin + len(piece.data)))
        extents.append(
            Extent(
                name=piece.name,
                kind=piece.kind,
                dtype=piece.dtype,
                shape=piece.shape,
                start=0,
                numel=prod(piece.shape),
                file=file,
                offset=at,
                nbytes=len(piece.data),
                checksum=native.checksum(piece.data),
                placement=piece.placement,
            )
        )
        chunks.append(piece.data)
        at += len(piece.data)
    return Tail(b"".join(chunks), tuple(entries), tuple(extents))


def data_file_header(plan: Plan, tail: Tail, *, run: str, step: int, rank: int) -> bytes:
    """The header's bytes, exactly as long as the plan reserved."""
    metadata = {"format": "dshistory-1", "run": run, "step": str(step), "rank": str(rank)}
    return encode_header([plan.header_json, entries_json(tail.entries)], metadata=metadata, data_start=plan.data_start)


def data_file_extents(plan: Plan, tail: Tail, checksums: bytes, header: bytes, *, file: str) -> pa.Table:
    """One manifest row for every byte of the file, in file order. `checksums` are those of the plan's parts, 16 bytes
    each.
    """
    first = Extent(
        name="__header__",
        kind="header",
        dtype="U8",
        shape=(len(header),),
        start=0,
        numel=len(header),
        file=file,
        offset=0,
        nbytes=len(header),
        checksum=native.checksum(header),
        placement="rank_local",
    )
    planned = plan.rows.table(checksums, file=file)
    return pa.concat_tables([extent_table([first]), planned, extent_table(tail.extents)])


def _pieces(objects: Sequence[PlacedObject]) -> list[_Piece]:
    tensors = [
        _Piece(
            name,
            "object_tensor",
            dtype_name(tensor.dtype, what=name),
            tuple(tensor.shape),
            placed.placement,
            _bytes_of(tensor),
        )
        for placed in objects
        for name, tensor in placed.encoded.tensors.items()
    ]
    trees = [
        _Piece(placed.encoded.name, "object", "U8", (len(placed.encoded.json),), placed.placement, placed.encoded.json)
        for placed in objects
    ]
    return [*sorted(tensors, key=lambda piece: -(len(piece.data) // max(1, prod(piece.shape)))), *trees]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
