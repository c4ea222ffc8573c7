"""The answers of functions that users pass: a number, or yes or no; an error names the function and what it got."""

from collections.abc import Callable
from typing import Any

from catalog.errors import SetupError

__all__ = ["number_of", "whether"]


def number_of(value: Any, *, what: str, wanted: str) -> float:
    """Return the number that a Python number, a tensor of one element or a NumPy scalar is.

    SetupError otherwise: `what`, the function, has returned the value, and is to do what `wanted` says.
    """
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SetupError(f"{what} returned {value!r}: {wanted}") from error


def whether(predicate: Callable[[Any], Any], subject: Callable[[], Any], *, verb: str, at: str) -> bool:
    """Return whether the predicate holds for what `subject` makes. SetupError, which names the verb and where it was,
    for an error of either and for an answer of None."""
    try:
        answer = predicate(subject())
        if answer is not None:
            return bool(answer)
    except Exception as error:
        raise SetupError(f"{verb}: the predicate failed at {at}: {type(error).__name__}: {error}") from error
    raise SetupError(f"{verb}: the predicate gave None at {at}: it must return whether it holds")
