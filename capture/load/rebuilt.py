"""A step that is not on the disk: its tensors as readers of a checkpoint find them, some in memory, the others in files
of the checkpoint that it was made from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import native
from capture.state.dtypes import dtype_name
from catalog.data_files.stored_bytes import Buffer
from catalog.format.dtypes import DTYPES
from catalog.records import CheckpointRef, Extent, Placement

__all__ = ["RebuiltStep", "held_extent"]

_FILE = "in-memory/rank-{:05d}"
"""Readers take the rank from the name of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class RebuiltStep:
    """The step `ref`, made from the checkpoint `base`: the extents of its tensors, and the elements, flat, of those
    that no file has. `objects` returns the objects of a rank by name; UnsupportedError where one is not known."""

    ref: CheckpointRef
    base: CheckpointRef
    extents: Sequence[Extent]
    held: Mapping[Extent, torch.Tensor]
    objects: Callable[[int], Mapping[str, Any]]

    def kept(self) -> dict[Extent, Buffer]:
        """Return the bytes of what is held, as `read_into` takes them."""
        return {extent: _bytes_of(elements) for extent, elements in self.held.items()}


def held_extent(
    key: tuple[str, str],
    tensor: torch.Tensor,
    *,
    number: int,
    placement: Placement,
    aliases: tuple[str, ...],
    rank: int = 0,
) -> tuple[Extent, torch.Tensor]:
    """Return the extent that a tensor in host memory would be, and its elements; `number` tells it from all others,
    and `rank` is the one whose own it is, where each has one."""
    kind, name = key
    elements = tensor.detach().contiguous().view(-1)
    dtype = dtype_name(tensor.dtype, what=f"{kind} {name!r}")
    nbytes = elements.numel() * DTYPES[dtype]
    digest = native.checksum(_bytes_of(elements))
    place = _FILE.format(rank), number, nbytes
    extent = Extent(name, kind, dtype, tuple(tensor.shape), 0, elements.numel(), *place, digest, placement, aliases)
    return extent, elements


def _bytes_of(elements: torch.Tensor) -> Buffer:
    found: Buffer = elements.view(torch.uint8).numpy()
    return found
