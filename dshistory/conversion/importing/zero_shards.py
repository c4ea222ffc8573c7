"""Logical tensors out of the flat shards of a ZeRO checkpoint: slices of every rank's tensors, joined when they are read.

Stages 1 and 2: a group's parameters one behind the other, cut over the ranks; padding at the very end only. Stage 3:
every parameter cut by itself, so a slice of each rank's tensors, the last one padded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from catalog.errors import FormatError

__all__ = ["GroupShards", "PartShards", "Shards", "offsets"]


@dataclass(frozen=True, slots=True)
class GroupShards:
    """Stages 1 and 2: one group's flat tensor, `ranks` in order; a parameter begins at `offset`."""

    ranks: Sequence[torch.Tensor]
    offset: int

    def read(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter. FormatError when the shards end before it."""
        numel = prod(shape)
        return _joined(_slice(self.ranks, self.offset, self.offset + numel), shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.ranks[0].dtype


@dataclass(frozen=True, slots=True)
class PartShards:
    """Stage 3: for each rank the flat tensors of its sub-groups in order; a rank's part begins at `offset` of them together."""

    ranks: Sequence[Sequence[torch.Tensor]]
    offset: int

    def read(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter. FormatError when the shards end before it."""
        size = -(-prod(shape) // len(self.ranks))
        parts = [part for flats in self.ranks for part in _slice(flats, self.offset, self.offset + size)]
        return _joined(parts, shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.ranks[0][0].dtype


Shards = GroupShards | PartShards


def offsets(shapes: Mapping[str, tuple[int, ...]], *, paddings: Sequence[int], world_size: int) -> dict[str, int]:
    """Where each parameter begins, each followed by its padding; `world_size` above 1 for parameters cut by themselves."""
    found, at = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        found[name] = at
        at += -(-prod(shape) // world_size) + padding
    return found


def _slice(flats: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    """Elements `[begin, end)` of tensors that stand one behind the other."""
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
