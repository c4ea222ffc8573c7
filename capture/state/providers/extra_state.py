"""The extra state of modules: what their `get_extra_state` returns, as data."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.unwrap import logical_name, unwrapped
from catalog.records import Placement

__all__ = ["ExtraState"]

_OBJECT = "extra_state"


class ExtraState:
    """The extra state of every submodule that has one, by the submodule's name; each rank keeps its own, as with
    buffers.
    """

    read_at: ReadAt = "step"
    is_looked_at = False

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = unwrapped(module)

    def __repr__(self) -> str:
        return f"<ExtraState of {type(self._module).__qualname__}>"

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        states = {name: module.get_extra_state() for name, module in self._speakers().items()}
        return {_OBJECT: (states, "rank_local")} if states else {}

    def prepare(self, available: Available) -> None:
        """Nothing to make: the modules exist."""

    def finish(self, available: Available) -> None:
        saved = available.objects.get(_OBJECT, {})
        for name, module in self._speakers().items():
            if name in saved:
                module.set_extra_state(saved[name])

    def _speakers(self) -> dict[str, torch.nn.Module]:
        silent = torch.nn.Module.get_extra_state
        return {
            logical_name(name): module
            for name, module in self._module.named_modules()
            if type(module).get_extra_state is not silent
        }
