"""The interface between a session and a training loop. A kind of loop implements `Loop`; a session, `LoopEvents`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from capture.loops.batch_digest import BatchDigest
from capture.loops.deepspeed.flat_tensors import Flat
from capture.state.interface import StateProvider

__all__ = ["Barrier", "Loop", "LoopEvents"]


class Barrier(Protocol):
    """Keeps the state whole: a loop calls it before anything writes the state, and goes on when it returns."""

    def before_update(self) -> None:
        """An optimizer update is about to begin. Called right before every one."""

    def before_access(self, what: str) -> None:
        """The state is about to be loaded, offloaded, destroyed or otherwise written; `what` names the way."""

    def editing(self, what: str) -> AbstractContextManager[None]:
        """Wrap an edit that the user means: values of the state between two steps. `what` names the way."""

    def layout_changed(self) -> None:
        """Tensors were created, moved or freed: a plan made before is void."""

    def closing(self) -> None:
        """The loop ends its life: this is the last moment to capture it."""


class LoopEvents(Barrier, Protocol):
    """The events of a loop that makes steps, all on the training thread.

    before_update, after_step, next_forward come in this order, for every step. `next_forward` may come more than once,
    or not at all where no forward can be seen: then the step is final when the next update begins.
    """

    @property
    def names_batches(self) -> bool:
        """True when `after_step` is to be told what the forwards of the step were given."""

    def after_step(
        self, *, applied: bool, metrics: Mapping[str, float | torch.Tensor], batch: BatchDigest | None
    ) -> None:
        """An optimizer step is over, and `Loop.step` counts it. Not `applied`: the update was skipped, so nothing may
        be captured here, and a snapshot that is due waits for the next step. Tensors in `metrics` must not change any
        more. batch: what the forwards of the step were given; None where none was seen.
        """

    def next_forward(self) -> None:
        """The next training forward begins: all that moves after an update has its value for the step."""


class Loop(Protocol):
    """One training loop: a DeepSpeed engine, or a module with its optimizer."""

    def check_capturable(self, *, whole: bool) -> None:
        """Raise SetupError for a loop that can only be restored. `whole`: raise UnsupportedError for state beside the
        weights that can't be captured, and warn of what is not.
        """

    def step(self) -> int:
        """Return the number of optimizer steps so far, skipped ones included."""

    def may_skip_updates(self) -> bool:
        """Return whether an update may be skipped without `after_step`, as torch's gradient scaler does. The scaler,
        the scheduler and the user's objects then advance although no step has ended.
        """

    def providers(self) -> Sequence[StateProvider]:
        """Return the providers of the loop's own state, in the order in which it is put back: model, buffers,
        optimizer, scheduler, counters. The session adds the data loader, the user's providers and, last, the RNG.
        """

    def facts(self) -> Mapping[str, Any]:
        """Return JSON for run.json: parallel layout, configuration, versions. Equal on all ranks."""

    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers whose groups and state an update reads, inside the wrappers of an engine."""

    def flat_tensors(self) -> Sequence[torch.Tensor]:
        """Return the flat tensors that an update writes in the place of parameters, and others behind them; none where
        it writes the parameters. Fast enough for every step."""

    def flats(self) -> Sequence[Flat]:
        """Return the flat tensors that an update writes, each with the parts of parameters that it holds. Slow."""

    def why_unrecordable(self) -> str | None:
        """Return why a redo log can't record the updates of this loop, whatever its optimizer is; None where it may."""

    def subjects(self) -> Sequence[Any]:
        """Return the live objects that hold the state, unwrapped: two sessions can't capture one of them at once."""

    def ranks(self) -> tuple[int, int]:
        """Return the rank and the world size."""

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        """Install the hooks that call `events`; return a function that removes them."""
