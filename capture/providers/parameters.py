"""The parameters of a module, under their names in the unwrapped module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from capture.items import Available, TensorItem
from catalog.errors import UnsupportedError
from catalog.records import Placement

__all__ = ["ModuleParameters", "first_names", "unwrapped"]

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile, whose names are the logical ones."""
    while True:
        inner = module.module if isinstance(module, _WRAPPERS) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def first_names(
    named: Callable[..., Iterator[tuple[str, torch.Tensor]]],
) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """Each tensor of `named_parameters` or `named_buffers` once: its first name, and the names it is tied to."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name.replace("_orig_mod.", ""))
        tensors[id(tensor)] = tensor
    for key, (first, *others) in names.items():
        yield first, tensors[key], tuple(others)


class ModuleParameters:
    """Every parameter once, trained or frozen, as live references; tied ones under their first name, the others as
    aliases.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = unwrapped(module)

    def tensors(self) -> Sequence[TensorItem]:
        items = []
        for name, parameter, aliases in first_names(self._module.named_parameters):
            value = parameter.detach()
            if type(parameter.data) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
                raise UnsupportedError(
                    f"parameter {name!r} is a {type(parameter.data).__qualname__} of layout {value.layout} on {value.device}: "
                    "only dense local tensors can be captured, not DTensor, sparse or meta ones"
                )
            items.append(TensorItem(name, "model", tuple(value.shape), value, aliases=aliases))
        return items

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {}

    def prepare(self, available: Available) -> None:
        """Nothing to make: parameters exist as soon as the module does."""

    def finish(self, available: Available) -> None:
        """Partial gradients are dropped: they belong to the weights that were there before."""
        for parameter in self._module.parameters():
            parameter.grad = None
