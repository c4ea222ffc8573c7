"""The batches of a replay: by the steps for which the replayed run used them, some are left out."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from capture.state.interface import Available, TensorItem
from catalog.errors import SetupError
from catalog.records import Placement

__all__ = ["BatchesOfSteps", "UnusedPosition", "leave_out"]


def leave_out(dataloader: Any, wanted: Callable[[], bool]) -> Callable[[], None]:
    """Let every iteration over `dataloader` ask `wanted`, once for each batch in turn, and leave out the others, until
    the function that is returned is called.

    The loader stays the same object, of a subclass of its class, because the script holds it already.
    SetupError when its class can't be replaced.
    """
    plain = type(dataloader)

    def iterate(self: Any) -> Iterator[Any]:
        # Many loaders draw random numbers when their iteration begins, so it must begin now and not at the first batch.
        batches = plain.__iter__(self)
        return (batch for batch in batches if wanted())

    body = {"__iter__": iterate, "__module__": plain.__module__, "__doc__": plain.__doc__}
    leaving_out = type(plain.__name__, (plain,), body)
    try:
        dataloader.__class__ = leaving_out
    except TypeError as error:
        raise SetupError(f"skip_batches: batches of a {plain.__qualname__} can't be left out: {error}") from error

    def undo() -> None:
        dataloader.__class__ = plain

    return undo


class UnusedPosition:
    """A State Provider that leaves the stored position of a data loader where it is, because a function gives the batch
    of each step."""

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {}

    def prepare(self, available: Available) -> None:
        """Take the position, so that nobody is warned that it is not put back."""
        available.objects.get("dataloader")

    def finish(self, available: Available) -> None:
        """Do nothing: there is no loader."""


class BatchesOfSteps:
    """Counts batches from the beginning of a replay, to tell for which step of the replayed run each was used."""

    def __init__(self, *, after_step: int, batches_per_step: int, left_out: Collection[int]) -> None:
        self._after_step = after_step
        self._batches_per_step = batches_per_step
        self._left_out = left_out
        self._drawn = 0

    def wanted(self) -> bool:
        """Count one more batch; return False when it is one of a step that is left out."""
        step = self._after_step + 1 + self._drawn // self._batches_per_step
        self._drawn += 1
        return step not in self._left_out
