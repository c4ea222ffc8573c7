"""Stored bytes of a device's part, read back for the device to compare with its own memory, piece by piece."""

from collections.abc import Iterator
from pathlib import Path

import torch

import native
from capture.devices.copies import Piece
from capture.devices.feed import DevicePart
from catalog.errors import CorruptError
from catalog.read.stored_bytes import read_unverified
from catalog.records import Extent

__all__ = ["stored_pieces"]

_PIECE_BYTES = 4 << 20
"""The host memory through which the stored bytes pass."""


def stored_pieces(root: Path, extent: Extent, part: DevicePart) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield the pieces of `part` in order, each with the bytes that are stored for it, uint8 host memory that is valid
    until the next one is asked for. CorruptError when these can't be read, or, at the end, when all of them together
    have not the extent's checksum.
    """
    running = native.RunningChecksum()
    memory = torch.empty(min(_PIECE_BYTES, extent.nbytes), dtype=torch.uint8)
    at = 0
    for piece in part.pieces(most_bytes=len(memory)):
        read = memory[: piece.nbytes]
        read_unverified(root, extent, read.data_ptr(), skip_bytes=at, nbytes=piece.nbytes)
        running.add(read.numpy())
        at += piece.nbytes
        yield piece, read
    if running.end() != extent.checksum:
        raise CorruptError(
            f"{root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: the bytes have not the "
            "checksum that they were written with: the file is damaged"
        )
