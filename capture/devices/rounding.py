"""Weights in host memory that are rounded on their way to the disk: never where they are, and a little at a time.

Their bytes in the file differ from those in memory, so the writer can't read them itself. A thread copies them piece by
piece, through memory that may be gone, and rounds the copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import native

__all__ = ["RoundedPart"]

_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class RoundedPart:
    """`numel` elements in host memory from `address` on, of dtype `live`, whose copy has the dtype `stored`. It holds
    no memory; OSError (EFAULT) says that it is gone.
    """

    address: int
    numel: int
    live: torch.dtype
    stored: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes they have in the file."""
        return self.numel * self.stored.itemsize

    @property
    def live_bytes(self) -> int:
        """The length of the live memory in bytes."""
        return self.numel * self.live.itemsize

    def round_into(self, target: torch.Tensor, *, begin: int) -> None:
        """Fill `target`, uint8 host memory, with the stored bytes from `begin` on."""
        elements = target.view(self.stored)
        first = begin // self.stored.itemsize
        copied = torch.empty(min(len(elements), _PIECE_ELEMENTS), dtype=self.live)
        for at in range(0, len(elements), _PIECE_ELEMENTS):
            piece = copied[: len(elements) - at]
            address = self.address + (first + at) * self.live.itemsize
            native.copy_memory(address=address, into=piece.view(torch.uint8).numpy())
            elements[at : at + len(piece)].copy_(piece)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the stored bytes in order, each piece until the next one is asked for."""
        size = self.stored.itemsize
        rounded = torch.empty(min(self.numel, _PIECE_ELEMENTS) * size, dtype=torch.uint8)
        for at in range(0, self.numel, _PIECE_ELEMENTS):
            piece = rounded[: (self.numel - at) * size]
            self.round_into(piece, begin=at * size)
            yield piece

    def checksum(self) -> bytes:
        """Return the checksum of the stored bytes, without storing them."""
        running = native.RunningChecksum()
        for piece in self.pieces():
            running.add(piece.numpy())
        return running.end()
