"""Which stored fragments fill which live memory: matching a checkpoint's extents with what the providers list.

Resharding is nothing but this: the fragments of a name, whatever world size or ZeRO stage wrote them, cover the range
that is wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from capture.state.dtypes import dtype_name
from capture.state.interface import TensorItem
from catalog.errors import MismatchError
from catalog.records import CheckpointRef, Extent

__all__ = ["Assignment", "Chosen", "choose", "match", "rank_of"]

_FALLBACK_KINDS = {"master": "model"}
"""A checkpoint of plain fp32 training has no master weights of its own: there the model's are the masters."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """`destination[at : at + numel]` (flattened) takes elements `[skip, skip + numel)` of `extent`."""

    extent: Extent
    destination: torch.Tensor
    at: int
    skip: int
    numel: int


@dataclass(slots=True)
class Chosen:
    """A checkpoint's extents by (kind, name), each list in order of `start`, as one rank reads them."""

    by_key: Mapping[tuple[str, str], Sequence[Extent]]
    aliases: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    def get(self, kind: str, name: str) -> Sequence[Extent]:
        """The extents of a tensor under any of its names; empty when the checkpoint has none."""
        key = (kind, name)
        return self.by_key.get(key) or self.by_key.get(self.aliases.get(key, key), ())


def rank_of(extent: Extent) -> int:
    """The rank that wrote an extent, by its file's name `rank-NNNNN.safetensors`."""
    return int(extent.file.rsplit("/", 1)[-1].removeprefix("rank-").split(".", 1)[0])


def choose(extents: Iterable[Extent], *, rank: int) -> Chosen:
    """What `rank` reads: all of what is partitioned or replicated; of what is local to a rank its own, or rank 0's
    where it has none.
    """
    by_key: dict[tuple[str, str], list[Extent]] = {}
    for extent in extents:
        by_key.setdefault((extent.kind, extent.name), []).append(extent)
    aliases = {}
    for (kind, name), members in by_key.items():
        if members[0].placement == "rank_local":
            wanted = rank if any(rank_of(extent) == rank for extent in members) else min(map(rank_of, members))
            members[:] = [extent for extent in members if rank_of(extent) == wanted]
        members.sort(key=lambda extent: (extent.start, extent.numel))
        aliases.update({(kind, alias): (kind, name) for extent in members for alias in extent.aliases})
    return Chosen(by_key, aliases)


def match(items: Sequence[TensorItem], chosen: Chosen, ref: CheckpointRef) -> list[Assignment]:
    """What fills every item, completely. MismatchError lists the first few that do not fit, with both sides."""
    assignments: list[Assignment] = []
    problems: list[str] = []
    for item in items:
        extents = chosen.get(item.kind, item.name)
        if not extents and item.kind in _FALLBACK_KINDS:
            extents = chosen.get(_FALLBACK_KINDS[item.kind], item.name)
        problem = _misfit(item, extents)
        if problem is None:
            found = list(_cover(item, extents))
            if sum(part.numel for part in found) == item.tensor.numel():
                assignments += found
                continue
            problem = f"only {sum(part.numel for part in found)} of its {item.tensor.numel()} elements are stored"
        problems.append(f"{item.kind} {item.name!r}: {problem}")
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise MismatchError(
            f"checkpoint {ref} does not fit what is to be restored: {'; '.join(problems[:5])}{more}: nothing was changed; "
            "build the model and the optimizer as they were"
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


def _cover(item: TensorItem, extents: Sequence[Extent]) -> Iterable[Assignment]:
    """Pieces of extents, in order and without overlap, that cover the item's range as far as they reach."""
    at, end = item.start, item.start + item.tensor.numel()
    for extent in extents:
        stop = min(end, extent.start + extent.numel)
        if extent.start <= at < stop:
            yield Assignment(extent, item.tensor, at - item.start, at - extent.start, stop - at)
            at = stop
