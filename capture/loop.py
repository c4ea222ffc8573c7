"""What a session must know of a training loop, and what the loop tells the session. Implemented once per kind of loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from capture.items import StateProvider

__all__ = ["Loop", "LoopEvents"]


class LoopEvents(Protocol):
    """What a loop tells its session, all on the training thread."""

    def before_update(self) -> None:
        """The barrier: the loop calls it right before every optimizer update and goes on when it returns."""

    def after_step(self, *, applied: bool, metrics: Mapping[str, float | torch.Tensor], settled: bool = True) -> None:
        """An optimizer step is over: counters have moved. `applied` False: nothing may be captured here, a snapshot
        that is due waits for the next step. Tensors in `metrics` must not change any more. `settled` False: scheduler
        and scaler may still move; `settled()` follows when they have.
        """

    def settled(self, *, moved: bool = True) -> None:
        """What moves after the update has moved: the next forward begins. `moved` False: the scheduler does not move with
        updates but by epochs, so the step's own state is the one it had at the update.
        """

    def before_access(self, what: str) -> None:
        """The barrier for any other way to the state: loading, offloading, destroying. `what` names it."""

    def layout_changed(self) -> None:
        """Tensors were created, moved or freed: what was planned is void."""

    def closing(self) -> None:
        """The loop ends its life: the last moment to capture it."""


class Loop(Protocol):
    """One training loop: a DeepSpeed engine, or a module with its optimizer."""

    def step(self) -> int:
        """Optimizer steps so far, skipped ones included."""

    def providers(self) -> Sequence[StateProvider]:
        """The state of the loop itself, in the order in which it is put back: model, buffers, optimizer, scheduler,
        counters. The session adds the data loader, the user's providers and, last, the RNG.
        """

    def facts(self) -> Mapping[str, Any]:
        """JSON for run.json: parallel layout, configuration, versions. Equal on all ranks."""

    def ranks(self) -> tuple[int, int]:
        """Rank and world size."""

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        """Install the hooks that call `events`; returns what removes them."""
