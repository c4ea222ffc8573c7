"""Which parts of a snapshot may be their masters, rounded: low-precision weights of which this rank writes the masters
too.

Whether they are is found out beside the training, bit by bit; here they are only paired by what they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from capture.data_file.parts import Part
from capture.state.interface import TensorItem

__all__ = ["Derivable", "derivable_parts", "masters_of"]

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
        """The address of the master's first element that belongs to the weight, where it is in host memory."""
        return self.master.address + self.skip * self.master.itemsize

    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight's elements and those of its master as two vectors: views of the memory that both tensors,
        which are contiguous, have now, whatever they are given later.
        """
        weights, masters = (
            part.item.tensor.detach().view(-1)[part.start - part.item.start :] for part in (self.part, self.master)
        )
        return weights[: self.part.numel], masters[self.skip :][: self.part.numel]

    @property
    def can_be_compared(self) -> bool:
        """Whether all of the weight's elements are among the master's, and both can be read side by side: in host
        memory, on one device, or the weight on a device and the master in host memory, as offloading leaves them.
        """
        if not 0 <= self.skip <= self.master.numel - self.part.numel:
            return False
        weight, master = self.part.device, self.master.device
        for device in (weight, master):
            if device is not None and not (device.tensor.is_contiguous() and device.stored == device.tensor.dtype):
                return False
        return master is None or (weight is not None and weight.tensor.device == master.tensor.device)


def masters_of(items: Sequence[TensorItem]) -> dict[int, TensorItem]:
    """Return the master of every low-precision weight that has one among `items`, by the id() of the weight's item: the
    first float32 one of the same name and shape, of the kind `master`, or of an optimizer's own that is named so, as
    `master_param`.
    """
    masters: dict[tuple[str, tuple[int, ...]], TensorItem] = {}
    for item in items:
        if item.kind.startswith("master") and item.stored_dtype == torch.float32:
            masters.setdefault((item.name, tuple(item.shape)), item)
    weights = (item for item in items if item.kind == "model" and item.stored_dtype in _HALVES)
    found = ((weight, masters.get((weight.name, tuple(weight.shape)))) for weight in weights)
    return {id(weight): master for weight, master in found if master is not None}


def derivable_parts(parts: Sequence[Part]) -> list[Derivable]:
    """Return the weights among the parts whose masters are there too. Both must stay in memory as they are until the
    barrier."""
    by_item = {id(part.item): part for part in parts if part.live and part.rounded is None and part.nbytes}
    masters = masters_of([part.item for part in by_item.values()])
    pairs = (Derivable(part, by_item[id(masters[weight])]) for weight, part in by_item.items() if weight in masters)
    return [pair for pair in pairs if pair.can_be_compared]
