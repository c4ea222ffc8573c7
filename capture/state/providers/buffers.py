"""The buffers of a module: forward changes them, so they are read at the step itself, and each rank keeps its own."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from capture.state.dtensor import local_part, local_tensor
from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.module_tree import ModuleTree, tensor_marks
from capture.state.unwrap import logical_name
from catalog.records import Placement

__all__ = ["Buffers"]

_OBJECT = "buffers"


class Buffers:
    """Every buffer once, persistent or not: a cache that forward reads decides the next loss as much as a weight does.

    The object `buffers` lists the non-persistent ones. A restore asks for every persistent buffer; of the others it
    puts back those that the module has in the same shape, since a module may make them only when it first needs them.
    """

    read_at: ReadAt = "before_update"

    def __init__(self, module: torch.nn.Module) -> None:
        self._tree = ModuleTree(module, of="buffers")
        self._restoring: Available | None = None

    def __repr__(self) -> str:
        return f"<Buffers of {type(self._tree.module).__qualname__}>"

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every buffer as it is now, under the name that `tensors` gives it."""
        for name, buffer, _ in self._tree:
            yield name, local_tensor(buffer)

    def fingerprint(self) -> Hashable:
        return self._tree.shape(), tensor_marks([buffer for _, buffer, _ in self._tree])

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        holders, _ = self._tree.roots()
        # No item has an owner.
        return holders, [local_tensor(buffer) for _, buffer, _ in self._tree.found()]

    def tensors(self) -> Sequence[TensorItem]:
        restoring, transient = self._restoring, self._non_persistent()
        items = []
        for name, buffer, aliases in self._tree:
            shape = tuple(buffer.shape)
            if restoring and name in transient and restoring.tensors.get(("buffer", name), ((-1,), ""))[0] != shape:
                continue
            part = local_part(buffer, what=f"buffer {name!r}")
            placement: Placement = "rank_local" if part.placement == "replicated" else part.placement
            items.append(TensorItem(name, "buffer", shape, part.tensor, part.start, placement, "eager", aliases))
        return items

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        transient = self._non_persistent()
        return {_OBJECT: ({"non_persistent": sorted(transient)}, "replicated")} if transient else {}

    def prepare(self, available: Available) -> None:
        self._restoring = available

    def finish(self, available: Available) -> None:
        self._restoring = None

    def _non_persistent(self) -> set[str]:
        return {
            logical_name(f"{prefix}.{name}" if prefix else name)
            for prefix, module in self._tree.module.named_modules()
            for name in module._non_persistent_buffers_set
        }
