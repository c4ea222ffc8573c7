"""The results of a user's function of a model: one number, or several by name; or how it failed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.tensors.borrowed_model import BorrowedModel
from dshistory.user_functions import number_of

__all__ = ["Failure", "Measured", "attempted", "measured", "measured_number"]

Measured = float | dict[str, float]
"""A number, or numbers by name."""


@dataclass(frozen=True)
class Failure:
    """Why a checkpoint was not measured; `error` is the error itself where this process has met it."""

    message: str
    error: Exception | None = None


def attempted(
    history: History, ref: CheckpointRef, fn: Callable[[Any], Any], borrowed: BorrowedModel, *, weights: str
) -> Measured | Failure:
    """Load a checkpoint into the model and return what the function gives; an error becomes a Failure."""
    try:
        return measured(fn, borrowed.load_checkpoint(history, ref, weights=weights), what=f"checkpoint {ref}")
    except Exception as error:  # noqa: BLE001 - whatever the function raises is the row of this checkpoint
        return Failure(f"{type(error).__name__}: {error}", error)


def measured(fn: Callable[[Any], Any], model: Any, *, what: str) -> Measured:
    """Call `fn(model)` and return its number, or its dict of numbers. SetupError, which names `what`, when it returns
    anything else; errors of `fn` itself pass."""
    value = fn(model)
    if isinstance(value, Mapping):
        if not value:
            raise SetupError(f"{what}: the function returned an empty dict: it must return numbers by name")
        return {str(name): measured_number(one, what=f"{what}: {name!r}") for name, one in value.items()}
    return measured_number(value, what=what)


def measured_number(value: Any, *, what: str) -> float:
    """Return the number that a user's function has returned. SetupError, which names `what`, when it is none."""
    return number_of(value, what=f"{what}: the function", wanted="it must return a number, or a dict of them")
