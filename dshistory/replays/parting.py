"""Where two runs part: the first step at which both have a checkpoint and these differ, and there the first element."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from catalog.history import History
from catalog.read.fragments import StoredTensor, rank_of, stored_tensors
from catalog.records import CheckpointRef, Extent
from dshistory.patterns import natural_order
from dshistory.tensors.stream import side_by_side

__all__ = ["Differences", "Parting", "differences"]

_FIRST: Final = ("model", "master")
"""The kinds by which a parting is told, where they have one."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first element, in the order of names, that differs between two checkpoints.

    rank: the rank that wrote it in the second checkpoint; index: its place in the tensor; before, after: both values
    """

    name: str
    kind: str
    rank: int
    index: tuple[int, ...]
    before: float
    after: float

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        kind = "" if self.kind == "model" else f" ({self.kind})"
        return f"{self.name}{place}{kind} of rank {self.rank}: {self.after!r} instead of {self.before!r}"


@dataclass(frozen=True, slots=True)
class Differences:
    """Says what differs between two checkpoints, bit for bit: logical tensors as (kind, name), and of the objects that
    both have their names."""

    tensors: Sequence[tuple[str, str]] = ()
    objects: Sequence[str] = ()
    compared: int = 0
    first: Parting | None = field(default=None)

    def __bool__(self) -> bool:
        """True when anything differs."""
        return bool(self.tensors or self.objects)


def differences(history: History, before: CheckpointRef, after: CheckpointRef, *, locate: bool = False) -> Differences:
    """Compare two checkpoints bit for bit; tensors that are stored in the same cuts are compared by their checksums,
    and only others are read. `locate`: find the first element that differs, too.

    A tensor that only one of them has differs; so does one of another shape or dtype.
    """
    sides = [stored_tensors(history.state_extents(ref)) for ref in (before, after)]
    keys = sorted(sides[0] | sides[1], key=lambda key: (_FIRST.index(key[0]) if key[0] in _FIRST else 9, *_order(key)))
    pairs = {key: (sides[0].get(key), sides[1].get(key)) for key in keys}
    differing = [key for key, pair in pairs.items() if not _equal(history.root, *pair)]
    located = (_first_element(history.root, *pairs[key]) for key in differing) if locate else iter(())
    first = next((found for found in located if found is not None), None)
    return Differences(differing, _other_objects(history, before, after), len(keys), first)


def _order(key: tuple[str, str]) -> tuple[str, list[tuple[int, int, str]]]:
    return key[0], natural_order(key[1])


def _equal(root: Path, before: StoredTensor | None, after: StoredTensor | None) -> bool:
    if before is None or after is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    cuts = [[(part.start, part.numel) for part in side.fragments] for side in (before, after)]
    if cuts[0] == cuts[1]:
        return before.same_bytes(after)
    return _first_element(root, before, after) is None


def _first_element(root: Path, before: StoredTensor | None, after: StoredTensor | None) -> Parting | None:
    """Return the first element that differs; None where there is none, or no element to compare it with."""
    if before is None or after is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return None
    place = 0
    for one, other in side_by_side(root, (before, after), lambda _: None):
        unequal = _bits(one) != _bits(other) if one.dtype == other.dtype else one != other
        if bool(unequal.any()):
            found = (
                int(unequal.any(dim=1).to(torch.uint8).argmax()) if unequal.dim() == 2 else int(unequal.int().argmax())
            )
            flat = place + found
            return Parting(
                after.name,
                after.kind,
                next(rank_of(part) for part in after.fragments if part.start <= flat < part.start + part.numel),
                _index(flat, after.shape),
                one[found].item(),
                other[found].item(),
            )
        place += one.numel()
    return None


def _bits(elements: torch.Tensor) -> torch.Tensor:
    """Return the bytes of every element: NaN equals itself, and 0.0 does not equal -0.0."""
    return elements.contiguous().view(torch.uint8).view(elements.numel(), elements.element_size())


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _other_objects(history: History, before: CheckpointRef, after: CheckpointRef) -> list[str]:
    """Return the names of the objects that both have and whose stored bytes differ, on any rank."""
    sides = [_objects(history.extents(ref, kinds=["object", "object_tensor"])) for ref in (before, after)]
    return sorted(name for name in sides[0].keys() & sides[1].keys() if sides[0][name] != sides[1][name])


def _objects(extents: Sequence[Extent]) -> dict[str, set[tuple[str, int, bytes]]]:
    """Return the content of each object: its own text, and the tensors in it, of every rank."""
    found: dict[str, set[tuple[str, int, bytes]]] = {}
    for extent in extents:
        found.setdefault(extent.name.split("/")[0], set()).add((extent.name, rank_of(extent), extent.checksum))
    return found
