"""Hooks on modules and optimizers: installed all or none, left out of copies and pickles, or around one method."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from capture.loops.interface import Barrier

__all__ = ["Hook", "hooks_on_loading", "install", "uncompiled", "wrap"]

_MISSING = object()


def install(hooks: Iterable[Callable[[], None]]) -> Callable[[], None]:
    """Install hooks: iterating installs each one, and yields the function that removes it. Return a function that
    removes all, which may be called more than once. When one can't be installed, none stays.
    """
    undo: list[Callable[[], None]] = []

    def remove() -> None:
        while undo:
            undo.pop()()

    try:
        for hook in hooks:
            undo.append(hook)
    except BaseException:
        remove()
        raise
    return remove


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of an optimizer's step that is called as it is also where `torch.compile` compiles that step."""
    called: Callable[..., Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return called


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Make `owner.name(...)` call `around(inner, ...)`, on this instance only; return a function that undoes it.

    If somebody has wrapped the method again since, this wrapper stays inside theirs and only passes calls through from
    then on.
    """
    previous = vars(owner).get(name, _MISSING)
    inner = getattr(owner, name)
    active = True

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs) if active else inner(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(owner).get(name) is wrapper:
            if previous is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

    setattr(owner, name, wrapper)
    return undo


class Hook:
    """A hook on a module. torch carries a module's hooks into its copies and pickles; this one becomes a function of
    the standard library there that does nothing, so that a copy keeps no session alive, and a pickle loads where
    DSHistory is not installed.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def hooks_on_loading(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], barrier: Barrier
) -> Iterator[Callable[[], None]]:
    """Yield hooks for `install`: loading a state dict into the module, a submodule or an optimizer waits at the
    barrier.
    """

    def loading(*_: Any) -> None:
        barrier.before_access("load_state_dict")

    def loaded(*_: Any) -> None:
        barrier.layout_changed()

    for part in module.modules():
        yield part.register_load_state_dict_pre_hook(Hook(loading)).remove  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        yield optimizer.register_load_state_dict_pre_hook(loading).remove
        yield optimizer.register_load_state_dict_post_hook(loaded).remove
