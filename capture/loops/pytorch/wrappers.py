"""Optimizers around optimizers, such as Lookahead and SAM: which there are, and where the outermost one's call ends.

Such a wrapper keeps the optimizer that it calls in an attribute, and has the same list of param groups. It writes the
weights before the inner optimizer's step, or after it, and its own hooks do not run, or are not there at all.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from capture.loops.interface import Barrier
from capture.loops.module_hooks import wrap

__all__ = ["WrapperCalls", "with_inner", "wrappers_of"]

_CALLS = ("step", "first_step", "second_step")
"""The methods that write the weights, by their usual names: SAM makes an update in two calls."""


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return `optimizer` behind all that it wraps: the innermost first."""
    found = [optimizer]
    while (inner := _inner(found[0])) is not None and all(inner is not one for one in found):
        found.insert(0, inner)
    return found


def wrappers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the wrappers that exist around the innermost `optimizer`, looked for among all objects if there is a class
    that may be one: torch's own optimizers wrap none."""
    if all(f"{kind.__module__}.".startswith("torch.optim.") for kind in _subclasses(torch.optim.Optimizer)):
        return []
    every = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer) and one is not optimizer]
    return [one for one in every if with_inner(one)[0] is optimizer]


def _subclasses(kind: type[torch.optim.Optimizer]) -> Iterator[type[torch.optim.Optimizer]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    # Accelerate's wrapper writes nothing itself.
    if type(optimizer).__module__.partition(".")[0] == "accelerate":
        return None
    groups = getattr(optimizer, "param_groups", None)
    held = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer) and one is not optimizer]
    return next((one for one in held if groups is not None and getattr(one, "param_groups", None) is groups), None)


class WrapperCalls:
    """The calls of wrappers that are under way.

    begin: called before each one, as before an update. end: called once after the outermost one within which `ended`
    was called, unless it has raised: then the weights are half written, and belong to no step
    """

    def __init__(self, *, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._depth = 0
        self._ended = False

    def hooks(self, wrappers: Sequence[torch.optim.Optimizer], barrier: Barrier) -> Iterator[Callable[[], None]]:
        """Yield hooks for `install`."""

        def load(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            barrier.before_access("load_state_dict")
            try:
                return inner(*args, **kwargs)
            finally:
                barrier.layout_changed()

        for wrapper in wrappers:
            for name in _CALLS:
                if callable(getattr(wrapper, name, None)):
                    yield wrap(wrapper, name, self._call)
            yield wrap(wrapper, "load_state_dict", load)

    def ended(self) -> bool:
        """Note that the inner optimizer's update is over; return whether the step is, because no call is under way."""
        self._ended = self._depth > 0
        return not self._ended

    def _call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self._depth += 1
        try:
            result = inner(*args, **kwargs)
        except BaseException:
            self._ended = False
            raise
        finally:
            self._depth -= 1
        if self._ended and not self._depth:
            self._ended = False
            self._end()
        return result
