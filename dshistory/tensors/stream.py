"""Logical tensors put together from their fragments, read in bounded memory whatever world size or stage wrote them.

    extents of a checkpoint  ->  logical tensors (fragments in order, complete, disjoint)  ->  a stream of elements

Extents up to PIECE_BYTES are read whole and their checksums compared; a larger one is read in pieces, which have no
checksum of their own: `verify` is what checks those.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import torch

import native
from capture.load.assignments import choose, rank_of
from capture.load.read_into import read_extents
from capture.state.dtypes import torch_dtype
from catalog.errors import FormatError
from catalog.format.manifest import NOT_STATE
from catalog.records import Extent

__all__ = ["PIECE_BYTES", "FragmentStream", "StoredTensor", "stored_tensors"]

PIECE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the model knows it; `fragments` cover its elements in order, once. Of a rank_local tensor there are
    `copies`, one of each rank, and these fragments are rank 0's."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    fragments: tuple[Extent, ...]
    copies: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(fragment.nbytes for fragment in self.fragments)

    def same_bytes(self, other: "StoredTensor") -> bool:
        """True only if both are known to be equal bit for bit without reading: same dtype, shape, cuts and
        checksums."""
        return (self.dtype, self.shape) == (other.dtype, other.shape) and [
            (f.start, f.numel, f.checksum) for f in self.fragments
        ] == [(f.start, f.numel, f.checksum) for f in other.fragments]


def stored_tensors(extents: Iterable[Extent]) -> dict[tuple[str, str], StoredTensor]:
    """The tensors of a checkpoint by (kind, name). Raises FormatError when fragments leave a hole, overlap or
    disagree."""
    tensors = [extent for extent in extents if extent.kind not in NOT_STATE]
    owners: dict[tuple[str, str], set[int]] = defaultdict(set)
    for extent in tensors:
        owners[extent.kind, extent.name].add(rank_of(extent) if extent.placement == "rank_local" else 0)
    chosen = choose(tensors, rank=0).by_key
    return {key: _stored(fragments, copies=len(owners[key])) for key, fragments in chosen.items()}


class FragmentStream:
    """The elements of one logical tensor, front to back, holding one piece (PIECE_BYTES) at a time."""

    def __init__(self, root: Path, tensor: StoredTensor) -> None:
        self._root = root
        self._dtype = torch_dtype(tensor.dtype)
        itemsize = self._dtype.itemsize
        self._pieces = iter([piece for fragment in tensor.fragments for piece in _pieces(fragment, itemsize)])
        self._piece = torch.empty(0, dtype=self._dtype)

    def ready(self) -> int:
        """How many elements `take` can give without reading further; reads the next piece when there are none. 0 at the
        end."""
        while not self._piece.numel():
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = self._read(*piece)
        return self._piece.numel()

    def take(self, numel: int) -> torch.Tensor:
        """The next numel elements, at most `ready()`; valid as long as it is referred to."""
        taken, self._piece = self._piece[:numel], self._piece[numel:]
        return taken

    def _read(self, extent: Extent, offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == extent.nbytes:
            return read_extents(self._root, [extent])[0]
        data = torch.empty(nbytes, dtype=torch.uint8)
        native.read(
            [str(self._root / extent.file)],
            file_index=np.zeros(1, np.uint32),
            offsets=np.array([extent.offset + offset], np.uint64),
            addresses=np.array([data.data_ptr()], np.uint64),
            nbytes=np.array([nbytes], np.uint64),
        )
        return data.view(self._dtype)


def _pieces(extent: Extent, itemsize: int) -> Iterable[tuple[Extent, int, int]]:
    step = PIECE_BYTES - PIECE_BYTES % itemsize
    for offset in range(0, extent.nbytes, step):
        yield extent, offset, min(step, extent.nbytes - offset)


def _stored(fragments: Sequence[Extent], *, copies: int) -> StoredTensor:
    first = fragments[0]
    where = f"{first.file}: {first.kind}/{first.name}"
    end = 0
    for extent in fragments:
        if (extent.dtype, extent.shape) != (first.dtype, first.shape):
            raise FormatError(
                f"{where} is {first.dtype} {first.shape}, but in {extent.file} it is {extent.dtype} {extent.shape}"
            )
        if extent.start != end:
            low, high = sorted((end, extent.start))
            raise FormatError(f"{where}: elements {low} to {high} are in no fragment or in two")
        end += extent.numel
    if end != prod(first.shape):
        raise FormatError(f"{where}: fragments hold {end} elements, the shape {first.shape} needs {prod(first.shape)}")
    return StoredTensor(first.name, first.kind, first.dtype, first.shape, first.aliases, tuple(fragments), copies)
