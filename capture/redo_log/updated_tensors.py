"""The tensors that an optimizer updates, by the names that a redo log has for them: parameters of the module, or the
flat tensors that DeepSpeed's optimizers have in their place.
"""

import operator
from collections.abc import Iterator, Sequence

import torch

from capture.loops.deepspeed.flat_tensors import Flat
from capture.loops.interface import Loop
from capture.state.dtypes import dtype_name
from capture.state.module_tree import ModuleTree
from catalog.errors import UnsupportedError
from catalog.format.redo_segment import RedoFlat, RedoFragment, RedoWrites

__all__ = ["UpdatedTensors"]


class UpdatedTensors:
    """Names the tensors that the updates of `loop` write, as they were when `look` was called last."""

    def __init__(self, loop: Loop, module: torch.nn.Module, *, rank: int, world_size: int) -> None:
        self._loop = loop
        self._parameters = ModuleTree(module, of="parameters")
        self._rank = rank
        self._world_size = world_size
        self._known: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._flats: Sequence[Flat] = ()
        self._names: dict[int, str] = {}
        self._groups: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._writes = RedoWrites((), world_size=world_size)
        self.are_flat = bool(loop.flat_tensors())

    def look(self) -> bool:
        """Name the tensors, anew where the optimizer has others; return whether it has."""
        groups = [] if self.are_flat else self._loop.optimizers()[0].param_groups
        known = self._loop.flat_tensors() if self.are_flat else [one for group in groups for one in group["params"]]
        sizes = [len(group["params"]) for group in groups]
        same = len(known) == len(self._known) and all(map(operator.is_, known, self._known))
        if same and sizes == self._sizes:
            return False
        self._known, self._sizes = list(known), sizes
        if self.are_flat:
            self._name_flats()
        else:
            self._name_parameters(groups)
        return True

    def name(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor; None where it has none."""
        return self._names.get(id(tensor))

    def known_name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor. UnsupportedError where it has none."""
        name = self.name(tensor)
        if name is None:
            raise UnsupportedError(f"a tensor of shape {tuple(tensor.shape)} is none of those that were known before")
        return name

    def group(self, tensor: torch.Tensor) -> int:
        """Return the index of the param group of a flat tensor."""
        return self._groups[id(tensor)]

    def is_recorded(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank records the gradient of a tensor: of what all ranks have alike, only the first."""
        return id(tensor) in self._recorded

    @property
    def all(self) -> Sequence[torch.Tensor]:
        """All of them, in order."""
        return [flat.tensor for flat in self._flats] if self.are_flat else self._known

    @property
    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The memory that an update writes on this rank, without the optimizer's state: that of every parameter, and
        the flat tensors, each with a name."""
        # Under ZeRO 3 a parameter has memory of its own only while a module runs.
        yield from ((name, getattr(one, "ds_tensor", one)) for name, one, _ in self._parameters)
        yield from ((self._names[id(flat.tensor)], flat.tensor) for flat in self._flats)

    @property
    def current(self) -> RedoWrites:
        """Describe what the last update has written, or will write where none was made yet."""
        return self._writes

    def writes(self, calls: Sequence[Sequence[str]]) -> RedoWrites:
        """Return what an update has written with these calls of the optimizer."""
        found = tuple(map(tuple, calls))
        whole = tuple(name for names in self._writes.params for name in names)
        if found in ((), (whole,)):
            found = ()
        if found != self._writes.calls:
            self._writes = RedoWrites(self._writes.params, self._writes.flats, found, self._world_size)
        return self._writes

    def _name_parameters(self, groups: Sequence[dict[str, list[torch.Tensor]]]) -> None:
        names = {id(one): name for name, one, _ in self._parameters}
        self._names = {id(one): names[id(one)] for one in self._known if id(one) in names}
        self._recorded = set(map(id, self._known)) if self._rank == 0 else set()
        params = tuple(tuple(names.get(id(one), "") for one in group["params"]) for group in groups)
        self._writes = RedoWrites(params, world_size=self._world_size)

    def _name_flats(self) -> None:
        self._flats = self._loop.flats()
        named = [(f"flat {index}", flat) for index, flat in enumerate(self._flats)]
        self._names = {id(flat.tensor): name for name, flat in named}
        self._groups = {id(flat.tensor): flat.group for _, flat in named}
        self._recorded = {id(flat.tensor) for flat in self._flats if flat.placement == "partitioned" or self._rank == 0}
        groups = range(len(self._loop.optimizers()[0].param_groups))
        params = tuple(tuple(name for name, flat in named if flat.group == group) for group in groups)
        flats = tuple(_described(name, flat) for name, flat in named)
        self._writes = RedoWrites(params, flats, world_size=self._world_size)


def _described(name: str, flat: Flat) -> RedoFlat:
    dtype = dtype_name(flat.tensor.dtype, what=name)
    fragments = tuple(RedoFragment(one.name, one.start, one.numel, one.offset) for one in flat.fragments)
    return RedoFlat(name, dtype, tuple(flat.tensor.shape), flat.placement, flat.is_model, fragments)
