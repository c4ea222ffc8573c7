"""Logical tensors from the flat shards of a ZeRO checkpoint: slices of every rank's tensors, joined when they are read.

In stages 1 and 2 a group's parameters follow one another in a flat tensor that is cut over the ranks, with padding at
its end only. In stage 3 every parameter is cut over the ranks by itself, with padding in the last rank's part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from catalog.errors import FormatError

__all__ = ["GroupShards", "PartShards", "Shards", "offsets"]


@dataclass(frozen=True, slots=True)
class GroupShards:
    """A parameter in stages 1 and 2, at `offset` of its group's flat tensor, whose parts are `ranks` in order."""

    ranks: Sequence[torch.Tensor]
    offset: int

    def read(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the parameter. Raises FormatError when the shards end before it."""
        numel = prod(shape)
        return _joined(_slice(self.ranks, self.offset, self.offset + numel), shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shards."""
        return self.ranks[0].dtype


@dataclass(frozen=True, slots=True)
class PartShards:
    """A parameter in stage 3: each rank has a part at `offset` of its flat tensors, one per sub-group in order."""

    ranks: Sequence[Sequence[torch.Tensor]]
    offset: int

    def read(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the parameter. Raises FormatError when the shards end before it."""
        size = -(-prod(shape) // len(self.ranks))
        parts = [part for flats in self.ranks for part in _slice(flats, self.offset, self.offset + size)]
        return _joined(parts, shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the shards."""
        return self.ranks[0][0].dtype


Shards = GroupShards | PartShards


def offsets(shapes: Mapping[str, tuple[int, ...]], *, paddings: Sequence[int], world_size: int) -> dict[str, int]:
    """Return the offset of each parameter when each is followed by its padding; `world_size` is 1 in stages 1 and 2."""
    found, at = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        found[name] = at
        at += -(-prod(shape) // world_size) + padding
    return found


def _slice(flats: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Return the elements `[begin, end)` of consecutive tensors, as slices."""
    found, at = [], 0
    for flat in flats:
        low, high = max(begin, at), min(end, at + flat.numel())
        if low < high:
            found.append(flat.view(-1)[low - at : high - at])
        at += flat.numel()
    return found


def _joined(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    held, numel = sum(part.numel() for part in parts), prod(shape)
    if held < numel:
        raise FormatError(f"the ranks' shards hold {held} of the {numel} elements of a tensor of shape {list(shape)}")
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts)))[:numel].view(shape)
