"""Reading many pieces of files at once into one buffer, in batches that fit it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

import native
from catalog.records import Extent

__all__ = ["Buffer", "Piece", "batches", "read_pieces"]

_MOST_EXTENTS = 4096

Buffer: TypeAlias = npt.NDArray[np.uint8]

Piece: TypeAlias = tuple[str, int, int]
"""File, relative to the history; offset; nbytes."""


def batches(extents: Iterable[Extent], *, most_bytes: int) -> Iterator[list[Extent]]:
    """The extents in order, in lists of at most `most_bytes` together; one that is larger stands alone."""
    batch: list[Extent] = []
    nbytes = 0
    for extent in extents:
        if batch and (nbytes + extent.nbytes > most_bytes or len(batch) == _MOST_EXTENTS):
            yield batch
            batch, nbytes = [], 0
        batch.append(extent)
        nbytes += extent.nbytes
    if batch:
        yield batch


def read_pieces(root: Path, pieces: Sequence[Piece], buffer: Buffer) -> bytes:
    """Read pieces one behind the other into the buffer; their XXH3-128, 16 bytes each. OSError, ValueError as of
    `native.read`.
    """
    files = sorted({file for file, _, _ in pieces})
    nbytes = np.array([size for _, _, size in pieces], np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(nbytes)[:-1]]).astype(np.uint64)
    return native.read(
        [str(root / file) for file in files],
        file_index=np.array([files.index(file) for file, _, _ in pieces], np.uint32),
        offsets=np.array([offset for _, offset, _ in pieces], np.uint64),
        addresses=starts + np.uint64(buffer.ctypes.data),
        nbytes=nbytes,
    )
