"""Streams the elements of one logical tensor in bounded memory, whatever world size or ZeRO stage wrote it.

    a StoredTensor (fragments in order, complete, disjoint)  ->  pieces of at most PIECE_BYTES  ->  elements front to
    back

A fragment of at most PIECE_BYTES is read whole and its checksum compared. A larger one is read in pieces, which have no
checksum of their own; `verify` checks those.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from capture.load.read_into import read_extents, read_part
from capture.state.dtypes import torch_dtype
from catalog.data_files.pieces import piece_of
from catalog.read.fragments import StoredTensor
from catalog.records import Extent

__all__ = ["NOTHING_HELD", "PIECE_BYTES", "FragmentStream", "Held", "read_small", "side_by_side"]

PIECE_BYTES: Final = 64 << 20
_SMALL_BYTES: Final = 1 << 20

Held = Mapping[Extent, torch.Tensor]
"""Fragments that were read and verified before, with their elements."""

NOTHING_HELD: Final[Held] = MappingProxyType({})


def read_small(root: Path, tensors: Iterable[StoredTensor]) -> Held:
    """Read the fragments of at most 1 MiB of these tensors, the first PIECE_BYTES of them, in one call: a call for
    each takes longer than its bytes. CorruptError when one can't be read or differs from its checksum."""
    small: list[Extent] = []
    room = PIECE_BYTES
    for fragment in (fragment for tensor in tensors for fragment in tensor.fragments):
        if fragment.nbytes <= min(_SMALL_BYTES, room):
            small.append(fragment)
            room -= fragment.nbytes
    # One call reads each place of a file once.
    places = {piece_of(fragment): fragment for fragment in small if fragment.nbytes}
    distinct = list(places.values())
    return dict(zip(distinct, read_extents(root, distinct), strict=True)) if distinct else NOTHING_HELD


class FragmentStream:
    """The elements of one logical tensor, front to back; holds one piece (PIECE_BYTES) at a time. Fragments that are
    `held` are not read again."""

    def __init__(self, root: Path, tensor: StoredTensor, *, held: Held = NOTHING_HELD) -> None:
        self._root = root
        self._held = held
        self._pieces = (piece for fragment in tensor.fragments for piece in _pieces(fragment))
        self._piece = torch.empty(0, dtype=torch_dtype(tensor.dtype))

    def ready(self) -> int:
        """Return how many elements `take` can give without reading; reads the next piece when there are none. 0 at the
        end.

        CorruptError when a fragment can't be read or its bytes differ from its checksum.
        """
        while not self._piece.numel():
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            extent, skip, numel = piece
            if extent in self._held:
                self._piece = self._held[extent][skip : skip + numel]
            elif numel == extent.numel:
                (self._piece,) = read_extents(self._root, [extent])
            else:
                self._piece = read_part(self._root, extent, skip=skip, numel=numel)
        return self._piece.numel()

    def take(self, numel: int) -> torch.Tensor:
        """Return the next `numel` elements, flat, at most `ready()`; the caller may keep them."""
        taken, self._piece = self._piece[:numel], self._piece[numel:]
        return taken


def side_by_side(
    root: Path,
    tensors: Iterable[StoredTensor],
    advance: Callable[[int], None],
    *,
    most_numel: int | None = None,
    held: Held = NOTHING_HELD,
) -> Iterator[list[torch.Tensor]]:
    """Yield the same elements of every tensor, flat, front to back, at most `most_numel` at a time, until the shortest
    ends; calls `advance` with the number of bytes of each read. What is `held` is not read again."""
    streams = [FragmentStream(root, tensor, held=held) for tensor in tensors]
    while numel := min(stream.ready() for stream in streams):
        taken = [stream.take(numel if most_numel is None else min(numel, most_numel)) for stream in streams]
        yield taken
        advance(sum(part.nbytes for part in taken))


def _pieces(extent: Extent) -> Iterator[tuple[Extent, int, int]]:
    """Yield (extent, first element, elements) for every piece; an empty extent has none."""
    step = PIECE_BYTES // torch_dtype(extent.dtype).itemsize
    for skip in range(0, extent.numel, step):
        yield extent, skip, min(step, extent.numel - skip)
