"""What a session must know of a training loop, and what the loop tells the session. Implemented once per kind of loop."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from capture.state.interface import StateProvider

__all__ = ["Barrier", "Loop", "LoopEvents"]


class Barrier(Protocol):
    """What keeps the state whole: a loop calls it before anything writes the state, and goes on when it returns."""

    def before_update(self) -> None:
        """Right before every optimizer update."""

    def before_access(self, what: str) -> None:
        """Before any other way to the state: loading, offloading, destroying. `what` names it."""

    def layout_changed(self) -> None:
        """Tensors were created, moved or freed: what was planned is void."""

    def closing(self) -> None:
        """The loop ends its life: the last moment to capture it."""


class LoopEvents(Barrier, Protocol):
    """What a loop tells its session, all on the training thread."""

    def after_step(
        self,
        *,
        applied: bool,
        metrics: Mapping[str, float | torch.Tensor],
        moving: Callable[[], frozenset[str]] | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        """An optimizer step is over: counters have moved. `applied` False: nothing may be captured here, a snapshot
        that is due waits for the next step. Tensors in `metrics` must not change any more. `moving` tells, when it is
        asked later, which objects have moved since and belong to this step as they are then; `keep`: objects that may
        move, yet belong to this step as they are now.
        """

    def settled(self) -> None:
        """What moves after the update has moved: the next forward begins."""


class Loop(Protocol):
    """One training loop: a DeepSpeed engine, or a module with its optimizer."""

    def check_capturable(self) -> None:
        """SetupError for what can be restored, not captured; warns of state that is not captured."""

    def step(self) -> int:
        """Optimizer steps so far, skipped ones included."""

    def providers(self) -> Sequence[StateProvider]:
        """The state of the loop itself, in the order in which it is put back: model, buffers, optimizer, scheduler,
        counters. The session adds the data loader, the user's providers and, last, the RNG.
        """

    def facts(self) -> Mapping[str, Any]:
        """JSON for run.json: parallel layout, configuration, versions. Equal on all ranks."""

    def subjects(self) -> Sequence[Any]:
        """The live objects whose state this is, unwrapped: none of them may be captured by two sessions at once."""

    def ranks(self) -> tuple[int, int]:
        """Rank and world size."""

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        """Install the hooks that call `events`; returns what removes them."""
