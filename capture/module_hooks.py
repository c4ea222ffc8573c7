"""Hooks on a module that its copies and pickles do without; those on loading are of every kind of loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from capture.loop import Barrier

__all__ = ["LoadingHooks", "ModuleHooks"]


class ModuleHooks:
    """Base of those whose methods are hooks on a module. torch carries a module's hooks into its copies and pickles. A copy
    calls the same object, whose methods look at which module they are called for; in a pickle they do nothing.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def _install(self, removers: Iterable[Callable[[], None]]) -> None:
        """Each item sets one hook and is what takes it off; where one can't be set, none stays."""
        try:
            for remove in removers:
                self._undo.append(remove)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take all hooks off; may be called more than once."""
        while self._undo:
            self._undo.pop()()

    def __deepcopy__(self, _: Any) -> "ModuleHooks":
        return self

    def __reduce__(self) -> tuple[type["_Unhooked"], tuple[()]]:
        return _Unhooked, ()


class LoadingHooks(ModuleHooks):
    """Loading a state dict into the module, a part of it or one of the optimizers waits at the barrier."""

    def __init__(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], barrier: Barrier) -> None:
        super().__init__()
        self._barrier = barrier
        self._parts = frozenset(id(part) for part in module.modules())
        self._install(self._set(module, optimizers))

    def _set(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[Callable[[], None]]:
        for part in module.modules():
            yield part.register_load_state_dict_pre_hook(self._loading_module).remove  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            yield optimizer.register_load_state_dict_pre_hook(self._loading).remove
            yield optimizer.register_load_state_dict_post_hook(self._loaded).remove

    def _loading_module(self, part: torch.nn.Module, *_: Any) -> None:
        if id(part) in self._parts:
            self._loading()

    def _loading(self, *_: Any) -> None:
        self._barrier.before_access("load_state_dict")

    def _loaded(self, *_: Any) -> None:
        self._barrier.layout_changed()


class _Unhooked:
    """What stands in a pickled module for its hooks."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass
