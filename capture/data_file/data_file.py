"""The ends of a data file: the trailer behind the planned bytes, the header before them, and the manifest rows for it
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pyarrow as pa
import torch

import native
from capture.data_file.parts import HUGE, Part, entry_shape
from capture.data_file.plan import Plan
from capture.state.dtypes import dtype_name
from capture.state.objects import EncodedObject
from catalog.format.extents import extent_table
from catalog.format.header import Entry, encode_header, entries_json
from catalog.records import Extent, Placement

__all__ = [
    "Piece",
    "PlacedObject",
    "PlacedPiece",
    "Trailer",
    "data_file_header",
    "make_trailer",
    "manifest_rows",
    "object_entries",
    "pad_piece",
    "piece_of_part",
    "piece_of_tensor",
]


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """An encoded object and its placement."""

    encoded: EncodedObject
    placement: Placement


@dataclass(frozen=True, slots=True)
class Piece:
    """An extent that the plan has no place for: its row in the manifest, and its entry in the header."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    placement: Placement
    nbytes: int
    key: str
    entry_shape: tuple[int, ...]
    start: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(1, prod(self.entry_shape))


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece that is in the file: its absolute offset there, and the checksum of its bytes."""

    piece: Piece
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Trailer:
    """The bytes that end the file, a multiple of the plan's alignment; and of all that follows the planned bytes the
    entries, relative to data_start, and the manifest rows.
    """

    data: bytes
    entries: tuple[Entry, ...]
    extents: tuple[Extent, ...]


def object_entries(objects: Sequence[PlacedObject]) -> list[Entry]:
    """Return entries at least as long as the objects' real ones, for which the header must reserve room."""
    entries = []
    for placed in objects:
        live = {name: one.tensor for name, one in placed.encoded.live.items()}
        for name, tensor in (placed.encoded.tensors | live).items():
            dtype = dtype_name(tensor.dtype, what=name)
            entries.append(Entry(f"object_tensor/{name}", dtype, tuple(tensor.shape), HUGE, HUGE))
        shape = (len(placed.encoded.json),)
        entries.append(Entry(f"object/{placed.encoded.name}", "U8", shape, HUGE, HUGE))
    return entries


def make_trailer(
    objects: Sequence[PlacedObject], plan: Plan, *, file: str, appended: Sequence[PlacedPiece] = ()
) -> Trailer:
    """Lay out the bytes that end the file, behind the planned ones and those that are `appended` to them: the objects'
    copied tensors by falling item size, then the JSON trees, then padding.
    """
    at = plan.data_end + sum(placed.piece.nbytes for placed in appended)
    placed = list(appended)
    chunks: list[bytes] = []
    pieces = _pieces(objects)
    pad = -sum(piece.nbytes for piece, _ in pieces) % plan.align
    if pad:
        pieces.append((pad_piece("tail", pad), bytes(pad)))
    for piece, data in pieces:
        placed.append(PlacedPiece(piece, at, native.checksum(data)))
        chunks.append(data)
        at += piece.nbytes
    entries = tuple(_entry(one, plan.data_start) for one in placed)
    return Trailer(b"".join(chunks), entries, tuple(_extent(one, file) for one in placed))


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


def piece_of_part(part: Part) -> Piece:
    """Return the piece that a part of the plan becomes when it was not written where it was planned."""
    item = part.item
    shape, whole = tuple(item.shape), entry_shape(part)
    return Piece(
        item.name, item.kind, part.dtype, shape, item.placement, part.nbytes, part.key, whole, part.start, item.aliases
    )


def piece_of_tensor(name: str, tensor: torch.Tensor, placed: PlacedObject) -> Piece:
    """Return the piece of a tensor of that object."""
    shape = tuple(tensor.shape)
    known_as = placed.encoded.names.get(name)
    return Piece(
        name,
        "object_tensor",
        dtype_name(tensor.dtype, what=name),
        shape,
        placed.placement,
        tensor.nbytes,
        f"object_tensor/{name}",
        shape,
        aliases=() if known_as is None else (known_as,),
    )


def pad_piece(name: str, nbytes: int) -> Piece:
    """Return the piece of `nbytes` zeros."""
    key = f"__pad__.{name}"
    return Piece(key, "pad", "U8", (nbytes,), "rank_local", nbytes, key, (nbytes,))


def _pieces(objects: Sequence[PlacedObject]) -> list[tuple[Piece, bytes]]:
    tensors, trees = [], []
    for placed in objects:
        for name, tensor in placed.encoded.tensors.items():
            tensors.append((piece_of_tensor(name, tensor, placed), _bytes_of(tensor)))
        name, json = placed.encoded.name, placed.encoded.json
        shape = (len(json),)
        tree = Piece(name, "object", "U8", shape, placed.placement, len(json), f"object/{name}", shape)
        trees.append((tree, json))
    return [*sorted(tensors, key=lambda pair: -pair[0].itemsize), *trees]


def _entry(placed: PlacedPiece, data_start: int) -> Entry:
    piece, begin = placed.piece, placed.offset - data_start
    return Entry(piece.key, piece.dtype, piece.entry_shape, begin, begin + piece.nbytes)


def _extent(placed: PlacedPiece, file: str) -> Extent:
    piece = placed.piece
    return Extent(
        name=piece.name,
        kind=piece.kind,
        dtype=piece.dtype,
        shape=piece.shape,
        start=piece.start,
        numel=prod(piece.entry_shape),
        file=file,
        offset=placed.offset,
        nbytes=piece.nbytes,
        checksum=placed.checksum,
        placement=piece.placement,
        aliases=piece.aliases,
    )


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
