"""The named tensors of a module, walked again only when the tree of modules or the tensors in it have changed."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch

from capture.state.dtensor import local_of_dtensors, local_tensors, sharded_of
from capture.state.unwrap import logical_name, unwrapped

__all__ = ["ModuleTree", "tensor_marks"]

Named = tuple[str, torch.Tensor, tuple[str, ...]]


class ModuleTree:
    """Iterates over the parameters, or the buffers, of the module inside `module`, each once: its first name, the
    tensor, and the further names it is tied to.
    """

    def __init__(self, module: torch.nn.Module, *, of: Literal["parameters", "buffers"]) -> None:
        self.module = unwrapped(module)
        self._of = of
        self._modules: list[torch.nn.Module] = []
        self._shape: Hashable = None
        self._named: list[Named] = []

    def __iter__(self) -> Iterator[Named]:
        self.shape()
        return iter(self._named)

    def shape(self) -> Hashable:
        """Return a value that stays equal as long as the same tensors have the same names. Costs 100 ns a tensor."""
        if self._now() != self._shape or not self._modules:
            self._modules = list(self.module.modules())
            self._named = list(self._walk())
            self._shape = self._now()
        return self._shape

    def found(self) -> Sequence[Named]:
        """Return what was found last, without a look at the module: to be called where `roots` are compared."""
        return self._named

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        """Return the roots of `interface.Rooted` for the tensors that were found last."""
        below, held = self._dicts()
        holders = chain.from_iterable(map(dict.values, chain(below, held)))
        return holders, local_of_dtensors([tensor for _, tensor, _ in self._named])

    def _dicts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        held = [part._parameters if self._of == "parameters" else part._buffers for part in self._modules]
        return [part._modules for part in self._modules], held

    def _now(self) -> Hashable:
        return tuple(
            (
                tuple(map(len, dicts)),
                tuple(chain.from_iterable(dicts)),
                tuple(map(id, chain.from_iterable(one.values() for one in dicts))),
            )
            for dicts in self._dicts()
        )

    def _walk(self) -> Iterator[Named]:
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        named = self.module.named_parameters if self._of == "parameters" else self.module.named_buffers
        sharded = sharded_of(self.module) if self._of == "parameters" else {}
        for name, hanging in named(remove_duplicate=False):
            tensor = sharded.get(id(hanging), hanging)
            names.setdefault(id(tensor), []).append(logical_name(name))
            tensors[id(tensor)] = tensor
        for key, (first, *others) in names.items():
            yield first, tensors[key], tuple(others)


def tensor_marks(tensors: list[torch.Tensor]) -> Hashable:
    """Return a value that stays equal as long as these tensor objects have the same memory in the same form."""
    local = local_tensors(tensors)
    return (
        tuple(map(id, tensors)),
        tuple([tensor.data_ptr() for tensor in local]),
        tuple([tensor.shape for tensor in local]),
        tuple([tensor.stride() for tensor in local]),
        tuple([tensor.dtype for tensor in local]),
    )
