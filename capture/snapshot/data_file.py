"""The ends of a data file: the trailer behind the planned bytes, the header before them, and the manifest rows for it
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pyarrow as pa
import torch

import native
from capture.snapshot.parts import HUGE, Part, entry_shape
from capture.snapshot.plan import Plan
from capture.state.dtypes import dtype_name
from capture.state.objects import EncodedObject
from catalog.format.extents import extent_table
from catalog.format.header import Entry, encode_header, entries_json
from catalog.records import Extent, Placement

__all__ = ["PlacedObject", "Trailer", "data_file_header", "make_trailer", "manifest_rows", "object_entries"]


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """An encoded object and its placement."""

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
    key: str
    entry_shape: tuple[int, ...]
    start: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        return len(self.data) // max(1, prod(self.entry_shape))


@dataclass(frozen=True, slots=True)
class Trailer:
    """The bytes that follow the planned ones, ending aligned; their entries, relative to data_start, and their manifest
    rows.
    """

    data: bytes
    entries: tuple[Entry, ...]
    extents: tuple[Extent, ...]


def object_entries(objects: Sequence[PlacedObject]) -> list[Entry]:
    """Return entries at least as long as the objects' real ones, for which the header must reserve room."""
    entries = []
    for placed in objects:
        for name, tensor in placed.encoded.tensors.items():
            dtype = dtype_name(tensor.dtype, what=name)
            entries.append(Entry(f"object_tensor/{name}", dtype, tuple(tensor.shape), HUGE, HUGE))
        shape = (len(placed.encoded.json),)
        entries.append(Entry(f"object/{placed.encoded.name}", "U8", shape, HUGE, HUGE))
    return entries


def make_trailer(
    objects: Sequence[PlacedObject], plan: Plan, *, file: str, mispredicted: Sequence[tuple[Part, bytes]] = ()
) -> Trailer:
    """Lay out the bytes that follow the planned ones: mispredicted parts and the objects' tensors, by falling item
    size, then the JSON trees, then padding.
    """
    at = plan.data_end
    chunks: list[bytes] = []
    entries: list[Entry] = []
    extents: list[Extent] = []
    pieces = _pieces(objects, mispredicted)
    end = at + sum(len(piece.data) for piece in pieces)
    pad = -end % plan.align
    if pad:
        pieces.append(_Piece("__pad__.tail", "pad", "U8", (pad,), "rank_local", bytes(pad), "__pad__.tail", (pad,)))
    for piece in pieces:
        begin = at - plan.data_start
        entries.append(Entry(piece.key, piece.dtype, piece.entry_shape, begin, begin + len(piece.data)))
        extents.append(
            Extent(
                name=piece.name,
                kind=piece.kind,
                dtype=piece.dtype,
                shape=piece.shape,
                start=piece.start,
                numel=prod(piece.entry_shape),
                file=file,
                offset=at,
                nbytes=len(piece.data),
                checksum=native.checksum(piece.data),
                placement=piece.placement,
                aliases=piece.aliases,
            )
        )
        chunks.append(piece.data)
        at += len(piece.data)
    return Trailer(b"".join(chunks), tuple(entries), tuple(extents))


def data_file_header(plan: Plan, trailer: Trailer, *, run: str, step: int, rank: int) -> bytes:
    """Return the header's bytes, exactly as long as the plan reserved."""
    metadata = {"format": "dshistory-1", "run": run, "step": str(step), "rank": str(rank)}
    return encode_header(
        [plan.header_json, entries_json(trailer.entries)], metadata=metadata, data_start=plan.data_start
    )


def manifest_rows(
    plan: Plan, trailer: Trailer, checksums: bytes, header: bytes, *, file: str, references: Sequence[Extent] = ()
) -> pa.Table:
    """Return rows that cover every byte of the file, in file order, then the references to other files. `checksums` has
    16 bytes for each of the plan's parts, in order.
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
    return pa.concat_tables([extent_table([first]), planned, extent_table([*trailer.extents, *references])])


def _pieces(objects: Sequence[PlacedObject], mispredicted: Sequence[tuple[Part, bytes]]) -> list[_Piece]:
    tensors = [_of_part(part, data) for part, data in mispredicted]
    trees = []
    for placed in objects:
        for name, tensor in placed.encoded.tensors.items():
            dtype = dtype_name(tensor.dtype, what=name)
            tensors.append(_of_object("object_tensor", name, dtype, tuple(tensor.shape), _bytes_of(tensor), placed))
        json = placed.encoded.json
        trees.append(_of_object("object", placed.encoded.name, "U8", (len(json),), json, placed))
    return [*sorted(tensors, key=lambda piece: -piece.itemsize), *trees]


def _of_part(part: Part, data: bytes) -> _Piece:
    item = part.item
    return _Piece(
        item.name,
        item.kind,
        part.dtype,
        tuple(item.shape),
        item.placement,
        data,
        part.key,
        entry_shape(part),
        part.start,
        item.aliases,
    )


def _of_object(kind: str, name: str, dtype: str, shape: tuple[int, ...], data: bytes, placed: PlacedObject) -> _Piece:
    return _Piece(name, kind, dtype, shape, placed.placement, data, f"{kind}/{name}", shape)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
