"""The bytes of extents, some spans at a time: whoever packs a large tensor never holds all of it.

An extent's checksum is known only when its last span has come, so what is made of the first ones counts only then.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import native
from catalog.data_files.pieces import Piece, piece_of
from catalog.data_files.stored_bytes import Buffer, ReadBuffer, batches
from catalog.records import Extent

__all__ = ["BLOCK_BYTES", "Span", "SpanReader", "SpanSums", "cut"]

BLOCK_BYTES = 1 << 20
"""Whoever reads a few elements unpacks a whole block; smaller ones would gain less."""

_MOST_BYTES = 16 * BLOCK_BYTES


class Span(NamedTuple):
    """The bytes `[skip, skip + nbytes)` of an extent: all of a small one, some blocks of a large one."""

    extent: Extent
    skip: int
    nbytes: int

    @property
    def place(self) -> Piece:
        """Where its bytes are in their file."""
        return piece_of(self.extent, skip_bytes=self.skip, nbytes=self.nbytes)

    def blocks(self) -> Iterator[slice]:
        """Yield the parts of the span that become a block each."""
        for begin in range(0, self.nbytes, BLOCK_BYTES):
            yield slice(begin, min(begin + BLOCK_BYTES, self.nbytes))


def cut(extents: Iterable[Extent]) -> Iterator[list[Span]]:
    """Yield the spans of extents in order, in lists of at most 16 MiB."""
    spans = (
        Span(extent, skip, min(_MOST_BYTES, extent.nbytes - skip))
        for extent in extents
        for skip in range(0, extent.nbytes, _MOST_BYTES)
    )
    return batches(spans, most_bytes=_MOST_BYTES)


class SpanReader:
    """Reads spans into memory that holds them until its next call."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._buffer = ReadBuffer()

    def read(self, spans: Sequence[Span]) -> list[Buffer]:
        """Return the bytes of each span; several may be at the same place. The errors are those of `read_to`."""
        places = sorted({span.place for span in spans})
        if not places:
            return []
        memory, _ = self._buffer.read(self._root, places, checksums=False)
        found = dict(zip(places, memory, strict=True))
        return [found[span.place] for span in spans]


class SpanSums:
    """Compares the bytes of extents, which come span after span, with the checksums of their manifests.

    wrong: makes the error for an extent whose bytes have another checksum, from the two as text
    """

    def __init__(self, wrong: Callable[[Extent, str], Exception]) -> None:
        self._wrong = wrong
        self._sum = native.RunningChecksum()

    def add(self, spans: Iterable[Span], memory: Iterable[Buffer]) -> None:
        """Take the bytes of some spans."""
        for span, data in zip(spans, memory, strict=True):
            if not span.skip:
                self._sum = native.RunningChecksum()
            self._sum.add(data)
            if span.skip + span.nbytes == span.extent.nbytes and self._sum.end() != span.extent.checksum:
                expected, actual = span.extent.checksum.hex(), self._sum.end().hex()
                raise self._wrong(span.extent, f"the manifest's checksum is {expected}, the bytes give {actual}")
