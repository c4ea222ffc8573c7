"""A counterfactual: what a replay does otherwise than the training that it replays, as data that can be recorded."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from catalog.errors import SetupError
from catalog.nearest_names import nearest

__all__ = ["Change"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The changes at the beginning of a replay. Whatever is None, or empty, stays as it was.

    lr: the learning rate of every update, whatever the scheduler says
    lr_scale: the learning rate of every update is the scheduled one, times this
    betas, momentum, weight_decay: of every parameter group; refused where no group has them
    seed: all random number generators begin with this; ranks begin with seed + rank
    skip_batches: the steps of the replayed run whose batches are left out; later ones move up
    reset_optimizer: the optimizer's state begins empty, its count of updates at 0
    function: is called with the module and the optimizer, and changes them in place; recorded by its name
    """

    lr: float | None = None
    lr_scale: float | None = None
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    seed: int | None = None
    skip_batches: tuple[int, ...] = ()
    reset_optimizer: bool = False
    function: Callable[[Any, Any], object] | None = None

    @classmethod
    def of(cls, given: "Mapping[str, Any] | Sequence[str] | Callable[[Any, Any], object] | Change | None") -> "Change":
        """Return the change that a user has described: by a dict, by texts as "lr_scale=0.5", or by a function.
        SetupError for an unknown name, or a value that it can't be.
        """
        if isinstance(given, Change):
            return given
        if given is None:
            return cls()
        if callable(given):
            return cls(function=given)
        if not isinstance(given, Mapping):
            given = dict(map(_named_value, given))
        known = [field.name for field in dataclasses.fields(cls) if field.name != "function"]
        for name in given:
            if name not in known:
                raise SetupError(f"change: there is no {name!r}; {nearest(str(name), known, count=1)}")
        return cls(**{name: _READ[name](name, value) for name, value in given.items() if value is not None})

    @property
    def changes_nothing(self) -> bool:
        """True for a replay that is to be the run again."""
        return self == type(self)()

    def as_json(self) -> dict[str, Any]:
        """Return what is changed, by name, as JSON for the facts of a run; a function is its name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        said = {name: value for name, value in named.items() if value not in (None, (), False)}
        if self.function is not None:
            said["function"] = getattr(self.function, "__qualname__", repr(self.function))
        return said

    def __str__(self) -> str:
        """The change as a person would write it."""
        return ", ".join(f"{name} {_short(value)}" for name, value in self.as_json().items()) or "nothing"


def _named_value(text: str) -> tuple[str, Any]:
    """Return the name and the value of a change that is given as text; the value is JSON, with or without brackets
    around several numbers.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise SetupError(f"change: {text!r} is not NAME=VALUE, as lr_scale=0.5")
    with contextlib.suppress(ValueError):
        return name, json.loads(value.lower())
    with contextlib.suppress(ValueError):
        return name, json.loads(f"[{value.strip('()')}]")
    raise SetupError(f"change: {name}={value!r}: give a number, several with commas between them, or true")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SetupError(f"change: {name}={value!r}: give a finite number")
    return float(value)


def _not_negative(name: str, value: Any) -> float:
    if (number := _number(name, value)) < 0:
        raise SetupError(f"change: {name}={value!r}: give a number of at least 0")
    return number


def _share(name: str, value: Any) -> float:
    if not 0 <= (number := _number(name, value)) < 1:
        raise SetupError(f"change: {name}={value!r}: give a number from 0 to below 1")
    return number


def _betas(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise SetupError(f"change: {name}={value!r}: give two numbers, as (0.9, 0.95)")
    return _share(name, value[0]), _share(name, value[1])


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SetupError(f"change: {name}={value!r}: give a whole number of at least 0")
    return value


def _steps(name: str, value: Any) -> tuple[int, ...]:
    given = [value] if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(given, str) or not isinstance(given, (Sequence, range, set, frozenset)):
        raise SetupError(f"change: {name}={value!r}: give the steps whose batches are left out, as [83, 84]")
    return tuple(sorted({_whole(name, step) for step in given}))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SetupError(f"change: {name}={value!r}: give True or False")
    return value


_READ: Mapping[str, Callable[[str, Any], Any]] = {
    "lr": _not_negative,
    "lr_scale": _not_negative,
    "betas": _betas,
    "momentum": _share,
    "weight_decay": _not_negative,
    "seed": _whole,
    "skip_batches": _steps,
    "reset_optimizer": _flag,
}


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
