"""Pieces: the ranges of bytes that readers ask for, as data files have them, or made of float32 numbers that they have.

The low-precision weights of a training are often its masters, rounded. Then the file has the masters only, and whoever
asks for the weights gets them without knowing: rounded from the masters where these are read in the same call anyway,
else from numbers that are read for it, a little at a time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from catalog.format.dtypes import DTYPES, ROUNDED_FROM
from catalog.records import Extent

__all__ = ["Cut", "Piece", "RawPieces", "cuts_of", "piece_of"]

_SOURCE_BYTES = DTYPES[ROUNDED_FROM]


class Piece(NamedTuple):
    """A range of bytes: the path of its file relative to the history, the offset, and the length in bytes. With
    `rounded_to`, a dtype, they are made of the float32 numbers that begin at the offset.
    """

    file: str
    offset: int
    nbytes: int
    rounded_to: str = ""

    @property
    def numel(self) -> int:
        """The number of elements of a piece that is rounded."""
        return self.nbytes // DTYPES[self.rounded_to]

    @property
    def source(self) -> "Piece":
        """The piece of the file that this one is made of."""
        return Piece(self.file, self.offset, self.numel * _SOURCE_BYTES) if self.rounded_to else self


class Cut(NamedTuple):
    """A part of a piece that is rounded, and the address where its bytes go."""

    piece: Piece
    address: int


class RawPieces:
    """The pieces that a call reads as they are, each to its address."""

    def __init__(self, pieces: Sequence[Piece], addresses: Sequence[int]) -> None:
        self._places: Mapping[str, list[tuple[int, int, int]]] = {}
        by_file: dict[str, list[tuple[int, int, int]]] = {}
        for piece, address in zip(pieces, addresses, strict=True):
            by_file.setdefault(piece.file, []).append((piece.offset, piece.offset + piece.nbytes, address))
        self._places = {file: sorted(places) for file, places in by_file.items()}

    def address_of(self, piece: Piece) -> int | None:
        """Return where the bytes of another piece are, if one of these has all of them."""
        places = self._places.get(piece.file, [])
        at = bisect_right(places, piece.offset, key=lambda place: place[0]) - 1
        if at < 0:
            return None
        begin, end, address = places[at]
        return address + piece.offset - begin if piece.offset + piece.nbytes <= end else None


def piece_of(extent: Extent, *, skip_bytes: int = 0, nbytes: int | None = None) -> Piece:
    """Return the piece with the bytes of an extent, or with `nbytes` of them from byte `skip_bytes` on. ValueError for
    a part that begins or ends within an element that is rounded."""
    length = extent.nbytes - skip_bytes if nbytes is None else nbytes
    if not extent.is_rounded:
        return Piece(extent.file, extent.offset + skip_bytes, length)
    if skip_bytes % DTYPES[extent.dtype] or length % DTYPES[extent.dtype]:
        raise ValueError(
            f"{extent.kind} {extent.name!r}: bytes {skip_bytes} to {skip_bytes + length} cut an element of "
            f"{extent.dtype} apart, which is rounded as one"
        )
    skipped = skip_bytes // DTYPES[extent.dtype] * _SOURCE_BYTES
    return Piece(extent.file, extent.offset + skipped, length, extent.dtype)


def cuts_of(pieces: Sequence[Cut], *, most_bytes: int) -> Iterator[list[Cut]]:
    """Yield all that is to be rounded in order, in lists whose sources have at most `most_bytes` together."""
    batch: list[Cut] = []
    room = most_bytes
    for piece, address in pieces:
        done = 0
        while done < piece.numel:
            numel = min(piece.numel - done, room // _SOURCE_BYTES)
            size = DTYPES[piece.rounded_to]
            part = Piece(piece.file, piece.offset + done * _SOURCE_BYTES, numel * size, piece.rounded_to)
            batch.append(Cut(part, address + done * size))
            done += numel
            room -= numel * _SOURCE_BYTES
            if room < _SOURCE_BYTES:
                yield batch
                batch, room = [], most_bytes
    if batch:
        yield batch
