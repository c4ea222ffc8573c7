"""Items that are kept from one snapshot to the next without keeping the training's memory.

What the training lets go (`p.data = empty`, `model.half()`, a state of the optimizer that is replaced) must be free at
once, also while the list of all tensors is kept for the next snapshot. A snapshot that still reads them holds them
itself, until it is finished.
"""

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence

import torch

from capture.state.interface import TensorItem

__all__ = ["Held", "all_alive", "keep_weakly", "references_to", "tensors_of"]

_COPIED = ("name", "kind", "shape", "start", "placement", "when", "aliases", "dtensor", "rounded_to", "written")
_FREED = torch.empty(0)


class _KeptItem(TensorItem):
    """An item whose tensor is its owner, held weakly: an empty one takes its place when the training has let it go."""

    __slots__ = ("_ref",)
    _ref: weakref.ref[torch.Tensor]

    def __init__(self, item: TensorItem, owner: torch.Tensor) -> None:
        # The base is frozen, and its slot `tensor` stays empty.
        for name in _COPIED:
            object.__setattr__(self, name, getattr(item, name))
        object.__setattr__(self, "owner", None)
        object.__setattr__(self, "_ref", weakref.ref(owner))

    @property
    def tensor(self) -> torch.Tensor:
        found = self._ref()
        return _FREED if found is None else found


class Held:
    """Holds the tensors of some items, and the memory that they have now, until it is dropped."""

    def __init__(self, items: Iterable[TensorItem]) -> None:
        self._tensors = [item.tensor for item in items]
        # `p.data = x` gives the same tensor other memory.
        self.storages = [tensor.untyped_storage() for tensor in self._tensors]


def keep_weakly(items: Sequence[TensorItem]) -> Sequence[TensorItem]:
    """Return the same items, without holding host memory that has an owner."""
    return [_weak(item) for item in items]


def references_to(items: Iterable[TensorItem]) -> list[weakref.ref[torch.Tensor]]:
    """Return for each item the training's own tensor object, or the item's where there is none, held weakly."""
    return [
        item._ref if isinstance(item, _KeptItem) else weakref.ref(item.tensor if item.owner is None else item.owner)
        for item in items
    ]


def tensors_of(references: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors, held from now on; an empty one takes the place of each that is gone."""
    found = list(map(operator.call, references))
    if any(map(operator.is_, found, itertools.repeat(None))):
        return [_FREED if tensor is None else tensor for tensor in found]
    return found  # type: ignore[return-value]


def all_alive(items: Iterable[TensorItem]) -> bool:
    """Return whether no kept item has lost its tensor."""
    references = [item._ref for item in items if isinstance(item, _KeptItem)]
    return not any(map(operator.is_, map(operator.call, references), itertools.repeat(None)))


def _weak(item: TensorItem) -> TensorItem:
    # The plan itself holds tensors of a device, and those that are not dense.
    owner = item.owner
    return item if owner is None or owner.device.type != "cpu" or not owner.is_contiguous() else _KeptItem(item, owner)
