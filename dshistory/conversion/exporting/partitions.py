"""Computes which elements of each parameter are where in which rank's flat tensors. Pure arithmetic.

Stages 1 and 2 concatenate the parameters of a group, pad them to a multiple of twice the world size and cut the result
into equal parts. Stage 3 cuts every parameter into equal parts and concatenates a rank's parts of a sub-group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Flat", "Piece", "groups_cut", "parameters_cut", "sub_groups"]

_NCCL_ALIGNMENT: Final = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `[start, start + numel)` of the flattened parameter `name` are `[at, at + numel)` of a flat tensor."""

    name: str
    start: int
    numel: int
    at: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat tensor of one rank: `numel` elements, of which the last `padding` belong to no parameter.

    `group` is the index of the optimizer's group.
    """

    group: int
    pieces: tuple[Piece, ...]
    numel: int
    padding: int = 0


def groups_cut(groups: Sequence[Sequence[tuple[str, int]]], *, rank: int, world_size: int) -> list[Flat]:
    """Return the flat tensors of one rank under stages 1 and 2, one for each group of (name, elements)."""
    flats = []
    for index, group in enumerate(groups):
        total = sum(numel for _, numel in group)
        size = _round_up(total, _NCCL_ALIGNMENT * world_size) // world_size
        low = rank * size
        pieces, at = [], 0
        for name, numel in group:
            first, last = max(at, low), min(at + numel, low + size)
            if first < last:
                pieces.append(Piece(name, first - at, last - first, first - low))
            at += numel
        flats.append(Flat(index, tuple(pieces), size, size - max(0, min(size, total - low))))
    return flats


def parameters_cut(
    groups: Sequence[Sequence[tuple[str, int]]], *, rank: int, world_size: int, sub_group_elements: int
) -> list[Flat]:
    """Return the flat tensors of one rank under stage 3, one for each sub-group."""
    flats = []
    for index, members in sub_groups(groups, world_size=world_size, sub_group_elements=sub_group_elements):
        pieces, at = [], 0
        for name, numel in members:
            size = -(-numel // world_size)
            start = min(rank * size, numel)
            if start < numel:
                pieces.append(Piece(name, start, min(size, numel - start), at))
            at += size
        flats.append(Flat(index, tuple(pieces), at))
    return flats


def sub_groups(
    groups: Sequence[Sequence[tuple[str, int]]], *, world_size: int, sub_group_elements: int
) -> list[tuple[int, list[tuple[str, int]]]]:
    """Return stage 3's sub-groups in order, each with the index of its optimizer's group."""
    return [(i, part) for i, group in enumerate(groups) for part in _cut(group, world_size, sub_group_elements)]


def _cut(group: Sequence[tuple[str, int]], world_size: int, limit: int) -> list[list[tuple[str, int]]]:
    """Cut a group after each parameter with which a rank's share reaches `limit` elements."""
    if limit >= sum(-(-numel // world_size) for _, numel in group):
        return [list(group)]
    found: list[list[tuple[str, int]]] = [[]]
    held = 0
    for name, numel in group:
        if held >= limit:
            found.append([])
            held = 0
        found[-1].append((name, numel))
        held += -(-numel // world_size)
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
