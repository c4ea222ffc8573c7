"""Any object with `state_dict` and `load_state_dict`: schedulers, scalers, data loaders, the user's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capture.state.interface import Available, ReadAt, TensorItem
from capture.state.unwrap import unwrapped_loader
from capture.user_warning import warn_user
from catalog.errors import UnsupportedError
from catalog.records import Placement

__all__ = ["DataloaderPosition", "Stateful"]


class Stateful:
    """The state of one object under one name, stored as data. A checkpoint without it leaves the object as it is.

    Its tensors can be looked at as a kind of tensors with that name: `dshistory.diff(10, 20, kinds="ema")`. Each is
    called by its place in the state: the key, or all keys on the way to it, joined by dots.

    target: has `state_dict()` and `load_state_dict(state)`, or is a dict, which is then restored in place
    placement: "replicated" when all ranks hold the same (rank 0 writes it), "rank_local" when each has its own
    read_at: "next_forward" when the loop updates the object after the optimizer, so that its state belongs to the step
       as it is when the next forward or update begins; "step" when the next batch changes it, so that its state
       belongs to the step as it is right after the optimizer; "before_update" when nothing but an update changes it.
       A function is asked for one of these every time.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        *,
        placement: Placement = "replicated",
        read_at: ReadAt | Callable[[], ReadAt] = "next_forward",
    ) -> None:
        if not isinstance(target, dict) and not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            raise UnsupportedError(
                f"{name}: {type(target).__qualname__} has no state_dict and load_state_dict; wrap it in an object "
                "that has"
            )
        self.name = name
        self._target = target
        self._placement: Placement = placement
        self._read_at = read_at

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {type(self._target).__qualname__}, read_at={self.read_at!r}>"

    @property
    def read_at(self) -> ReadAt:
        return self._read_at() if callable(self._read_at) else self._read_at

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        state = self._target if isinstance(self._target, dict) else self._target.state_dict()
        return {self.name: (state, self._placement)}

    def prepare(self, available: Available) -> None:
        if available.objects and self.name not in available.objects:
            warn_user(
                f"the checkpoint has no {self.name!r}, it has {', '.join(sorted(available.objects))}: "
                f"{self.name!r} stays as it is and starts fresh"
            )

    def finish(self, available: Available) -> None:
        if self.name not in available.objects:
            return
        state = available.objects[self.name]
        if isinstance(self._target, dict):
            self._target.clear()
            self._target.update(state)
        else:
            self._target.load_state_dict(state)


class DataloaderPosition(Stateful):
    """The position of a data loader such as torchdata's StatefulDataLoader; each rank keeps its own.

    A StatefulDataLoader that has not started makes its iterator, and draws a seed for it, when asked for its state; the
    `iter(dataloader)` that follows takes that iterator and draws nothing.
    """

    is_looked_at = False

    def __init__(self, dataloader: Any) -> None:
        self._inner = unwrapped_loader(dataloader)
        if not (hasattr(self._inner, "state_dict") and hasattr(self._inner, "load_state_dict")):
            raise UnsupportedError(
                f"dataloader: {type(dataloader).__qualname__} can't tell its position (no state_dict); use "
                "torchdata.stateful_dataloader.StatefulDataLoader, which dshistory[dataloader] installs (with "
                "Accelerate: DataLoaderConfiguration(use_stateful_dataloader=True)), or leave dataloader= out and "
                "restore the position yourself"
            )
        super().__init__("dataloader", dataloader, placement="rank_local", read_at="step")

    def finish(self, available: Available) -> None:
        super().finish(available)
        if self.name in available.objects and hasattr(self._inner, "_initial_iter_for_state_dict"):
            # Makes the iterator now, which draws a seed: a later `iter(dataloader)` takes this one, and the RNG,
            # restored after us, is not touched again.
            self._inner.state_dict()
