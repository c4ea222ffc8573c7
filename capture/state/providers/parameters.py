"""The parameters of a module, under their names in the unwrapped module."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from capture.state.dtensor import drop_gathered, local_part, local_tensor, refuse_flat_parameters
from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.module_tree import ModuleTree, tensor_marks
from catalog.errors import UnsupportedError
from catalog.records import Placement

__all__ = ["ModuleParameters"]


class ModuleParameters:
    """Every parameter once, trained or frozen, as live references; tied ones under their first name, the others as
    aliases.
    """

    read_at: ReadAt = "before_update"

    def __init__(self, module: torch.nn.Module) -> None:
        self._tree = ModuleTree(module, of="parameters")

    def __repr__(self) -> str:
        return f"<ModuleParameters of {type(self._tree.module).__qualname__}>"

    def tensors(self) -> Sequence[TensorItem]:
        refuse_flat_parameters(self._tree.module)
        items = []
        renormed = self._renormed()
        for name, parameter, aliases in self._tree:
            if is_lazy(parameter):
                raise UnsupportedError(f"parameter {name!r} has no shape yet: run a forward before it is captured")
            value = local_tensor(parameter).detach()
            if (
                type(local_tensor(parameter).data) is not torch.Tensor
                or value.layout is not torch.strided
                or value.is_meta
            ):
                raise UnsupportedError(
                    f"parameter {name!r} is a {type(parameter.data).__qualname__} of layout {value.layout} on "
                    f"{value.device}: only dense tensors can be captured, not sparse or meta ones"
                )
            part = local_part(parameter, what=f"parameter {name!r}")
            when: Literal["lazy", "eager"] = "eager" if id(parameter) in renormed else "lazy"
            place = part.start, part.placement
            owner = parameter if part.through is None else None
            items.append(TensorItem(name, "model", part.shape, part.tensor, *place, when, aliases, part.through, owner))
        return items

    def weights(self) -> Sequence[TensorItem]:
        return self.tensors()

    def _renormed(self) -> set[int]:
        """Return the ids of the parameters that forward writes to: embeddings with `max_norm`."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        modules = (module for module in self._tree.module.modules() if isinstance(module, kinds))
        return {id(module.weight) for module in modules if module.max_norm is not None}

    def fingerprint(self) -> Hashable:
        return self._tree.shape(), tensor_marks([parameter for _, parameter, _ in self._tree])

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        return self._tree.roots()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {}

    def prepare(self, available: Available) -> None:
        """Nothing to make: parameters exist as soon as the module does."""

    def finish(self, available: Available) -> None:
        """Partial gradients and gathered weights are dropped: they belong to the weights that were there before."""
        for parameter in self._tree.module.parameters():
            parameter.grad = None
        drop_gathered(self._tree.module)
