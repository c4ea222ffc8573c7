"""Matches a checkpoint's fragments with the live memory that they fill."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from capture.state.dtypes import dtype_name
from capture.state.interface import TensorItem
from catalog.errors import MismatchError
from catalog.read.fragments import RankFragments, parts_of
from catalog.records import CheckpointRef, Extent

__all__ = ["Assignment", "assign", "match"]

_FALLBACK_KINDS = {"master": "model"}
"""A checkpoint of plain fp32 training has no separate master weights: the model's weights are the masters."""
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """`destination[at : at + numel]` (flattened) takes elements `[skip, skip + numel)` of `extent`."""

    extent: Extent
    destination: torch.Tensor
    at: int
    skip: int
    numel: int


def assign(
    fragments: Sequence[Extent], destination: torch.Tensor, *, start: int, numel: int, at: int = 0
) -> list[Assignment]:
    """Fill `destination[at : at + numel]` with elements `[start, start + numel)` of the tensor of these fragments.

    The range is stored completely exactly when the assignments have `numel` elements together.
    """
    parts = parts_of(fragments, start=start, numel=numel)
    return [Assignment(part.extent, destination, at + part.at, part.skip, part.numel) for part in parts]


def match(items: Sequence[TensorItem], chosen: RankFragments, ref: CheckpointRef) -> list[Assignment]:
    """Return what fills every item completely. MismatchError lists the first few that do not fit, with both sides."""
    assignments: list[Assignment] = []
    problems: list[str] = []
    for item in items:
        extents = chosen.get(item.kind, item.name)
        if not extents and item.kind in _FALLBACK_KINDS:
            extents = chosen.get(_FALLBACK_KINDS[item.kind], item.name)
        problem = _misfit(item, extents)
        if problem is None:
            numel = item.tensor.numel()
            found = assign(extents, item.tensor, start=item.start, numel=numel)
            held = sum(part.numel for part in found)
            if held == numel:
                assignments += found
                continue
            problem = f"only {held} of its {numel} elements are stored"
        problems.append(f"{item.kind} {item.name!r}: {problem}")
    if problems:
        hidden = len(problems) - _SHOWN_PROBLEMS
        more = f", and {hidden} more" if hidden > 0 else ""
        raise MismatchError(
            f"checkpoint {ref} does not fit what is to be restored: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}: "
            "nothing was changed; build the model and the optimizer as they were"
        )
    return assignments


def _misfit(item: TensorItem, extents: Sequence[Extent]) -> str | None:
    if not extents:
        return "the checkpoint does not have it"
    if tuple(extents[0].shape) != tuple(item.shape):
        return f"shape {tuple(extents[0].shape)} in the checkpoint, {tuple(item.shape)} here"
    here = dtype_name(item.tensor.dtype, what=item.name)
    if extents[0].dtype != here:
        return f"dtype {extents[0].dtype} in the checkpoint, {here} here"
    return None
