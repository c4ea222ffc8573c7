"""The results of a user's function of a model: one number, or several by name; or how it failed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.tensors.borrowed_model import BorrowedModel
from dshistory.user_functions import number_of

if TYPE_CHECKING:
    from capture.load.rebuilt import RebuiltStep
    from capture.redo.rebuild import RebuiltSteps
    from capture.redo.steps import RedoRef

__all__ = ["Attempts", "Failure", "Measured", "measured", "measured_number"]

Measured = float | dict[str, float]
"""A number, or numbers by name."""


@dataclass(frozen=True)
class Failure:
    """Why a checkpoint was not measured; `error` is the error itself where this process has met it."""

    message: str
    error: Exception | None = None


class Attempts:
    """Measures the checkpoints of a history with a function of the model, one after the other. Of steps of a redo log
    that follow each other in ascending order each update is made once. To be closed."""

    def __init__(self, history: History, fn: Callable[[Any], Any], borrowed: BorrowedModel, *, weights: str) -> None:
        self._history = history
        self._fn = fn
        self._borrowed = borrowed
        self._weights = weights
        self._steps: RebuiltSteps | None = None

    def attempt(self, ref: CheckpointRef) -> Measured | Failure:
        """Load a checkpoint into the model and return what the function gives; an error becomes a Failure."""
        try:
            model = self._borrowed.load_checkpoint(
                self._history, ref, weights=self._weights, made_again=self._made_again
            )
            return measured(self._fn, model, what=f"checkpoint {ref}")
        except Exception as error:  # noqa: BLE001 - whatever the function raises is the row of this checkpoint
            return Failure(f"{type(error).__name__}: {error}", error)

    def close(self) -> None:
        """Let go of what steps were made from."""
        if self._steps is not None:
            self._steps.close()

    def _made_again(self, step: "RedoRef") -> "RebuiltStep":
        if self._steps is None:
            # Only here, so that measuring checkpoints loads none of what makes updates.
            from capture.redo.rebuild import RebuiltSteps

            self._steps = RebuiltSteps(self._history)
        return self._steps.make(step)


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
