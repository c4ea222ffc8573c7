"""Which parts of a snapshot may be their masters, rounded: low-precision weights of which this rank writes the masters
too.

Whether they are is found out beside the training, bit by bit; here they are only paired by what they hold.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from capture.snapshot.parts import Part
from capture.state.interface import TensorItem

__all__ = ["Derivable", "derivable_parts", "is_master", "is_rounded_weight"]

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Derivable:
    """A part of a low-precision weight, and the part of its master that has the same elements, among others perhaps."""

    part: Part
    master: Part

    @property
    def skip(self) -> int:
        """How many elements of the master come before the first one of the weight."""
        return self.part.start - self.master.start

    @property
    def master_address(self) -> int:
        """The address of the master's first element that belongs to the weight."""
        return self.master.address + self.skip * self.master.itemsize


def is_master(item: TensorItem) -> bool:
    """Return whether an item is a float32 original of a weight: of the kind `master`, or of an optimizer's own that is
    named so, as `master_param`.
    """
    return item.kind.startswith("master") and item.stored_dtype == torch.float32


def is_rounded_weight(item: TensorItem) -> bool:
    """Return whether an item is a weight that may have a master."""
    return item.kind == "model" and item.stored_dtype in _HALVES


def derivable_parts(parts: Sequence[Part], *, but: Container[str]) -> list[Derivable]:
    """Return the weights among the parts whose masters are there too, except for those whose keys are in `but`. Both
    must stay in host memory as they are until the barrier."""
    masters: dict[tuple[str, tuple[int, ...]], Part] = {}
    for part in _read_live(parts):
        if is_master(part.item):
            masters.setdefault((part.item.name, tuple(part.item.shape)), part)
    pairs = (
        Derivable(part, masters[part.item.name, tuple(part.item.shape)])
        for part in _read_live(parts)
        if is_rounded_weight(part.item) and part.key not in but and (part.item.name, tuple(part.item.shape)) in masters
    )
    return [pair for pair in pairs if 0 <= pair.skip <= pair.master.numel - pair.part.numel]


def _read_live(parts: Iterable[Part]) -> Iterable[Part]:
    return (part for part in parts if part.live and part.fed is None and part.nbytes)
