"""The hooks of a plain loop: they tell when a step begins, when it is over, and when its objects are final.

The weights of step n belong with the scheduler's and the scaler's n-th move, and those follow `optimizer.step()`. So a
step ends there, and its objects are final when the next training forward (or the barrier) begins: the objects that can
move in between, and nothing else, are read then. A scheduler that moves by epochs is an exception: the loop that is
resumed at an epoch's last step moves it itself, so the step keeps the state from before. It shows by never moving after
two updates in a row.
"""

import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from capture.loops.batch_digest import BatchDigests
from capture.loops.interface import LoopEvents
from capture.loops.module_hooks import Hook, hooks_on_loading, install, uncompiled
from capture.loops.pytorch.unknown_optimizers import guard_foreign_updates
from capture.loops.pytorch.wrappers import WrapperCalls
from capture.loops.step_metrics import StepMetrics, loss_in
from capture.state.interface import ReadAt

__all__ = ["Pace", "TorchHooks"]

_SKIPPED: Final = 10
"""A scheduler that moves with updates may be left out, as a script does after an overflow, for at most so many of them
in a row. One that stands still for longer moves by epochs from then on, as after a warm-up."""

_NEVER: Final = object()

_STEP: Final = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The qualified name of the function that torch puts around the `step` of every class of optimizers."""


@dataclass(slots=True)
class _Moves:
    """How a scheduler was seen to move.

    by_updates: it has moved after two updates in a row, as none does that moves by epochs of more than one step
    """

    by_epochs: bool = False
    by_updates: bool = False
    has_moved: bool = False
    stood_still: int = 0


_moves: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Moves] = weakref.WeakKeyDictionary()


class Pace:
    """Learns whether the scheduler moves after every update, or by epochs. What is learned outlives a session, and is
    part of the state that is restored, as the count of steps is.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._at_update: Any = _NEVER

    @property
    def by_epochs(self) -> bool:
        """True when the scheduler stands still after most updates; also when there is none."""
        return self._seen.by_epochs

    @property
    def _seen(self) -> _Moves:
        return _moves.setdefault(self._optimizer, _Moves())

    def restored(self, *, by_epochs: bool, step: int) -> None:
        """Take over what was learned until `step`, of the training that goes on from there."""
        # After one update nothing was known yet.
        _moves[self._optimizer] = _Moves(by_epochs, by_updates=not by_epochs and step > 1)

    @property
    def read_at(self) -> ReadAt:
        """When the objects that the scheduler moves, its own and the optimizers', are to be read."""
        if not self.by_epochs:
            return "next_forward"
        return "before_update" if self._scheduler is None else "step"

    def updated(self) -> None:
        """Note the scheduler's position: an update has just ended."""
        self._at_update = self._position()

    def learn(self) -> None:
        """Compare positions: by now the scheduler has moved, if it moves with updates at all."""
        if self._at_update is _NEVER:
            return
        seen, moved = self._seen, self._position() != self._at_update
        self._at_update = _NEVER
        seen.stood_still = 0 if moved else seen.stood_still + 1
        if moved and seen.has_moved:
            seen.by_epochs, seen.by_updates = False, True
        elif not moved and (not seen.by_updates or seen.stood_still > _SKIPPED):
            seen.by_epochs, seen.by_updates = True, False
        seen.has_moved = moved

    def _position(self) -> Any:
        """Return a value that tells two positions apart: a count, or for schedulers without one their whole state."""
        if hasattr(self._scheduler, "last_epoch"):
            return self._scheduler.last_epoch
        return repr(self._scheduler.state_dict()) if hasattr(self._scheduler, "state_dict") else None


class TorchHooks:
    """The hooks of one session on a module and its optimizers, from now until `remove` is called.

    count: called at the end of each step, before the session hears of it. last: the optimizer whose update ends a step;
    wrappers: those around it, whose calls end later
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        pace: Pace,
        *,
        count: Callable[[], None],
        events: LoopEvents,
        last: torch.optim.Optimizer,
        wrappers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._module = module
        self._optimizer = last
        self._calls = WrapperCalls(begin=self._begin_update, end=self._end_step)
        self._pace = pace
        self._metrics = StepMetrics()
        self._batches = BatchDigests()
        self._count = count
        self._events = events
        self.remove = install(self._hooks(optimizers, wrappers))

    def _hooks(
        self, optimizers: Sequence[torch.optim.Optimizer], wrappers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[Callable[[], None]]:
        module, last = self._module, self._optimizer
        # Other hooks may write the state too. torch runs global hooks first before a step, and last after it: the first
        # one there is before everybody's, and the last one here after everybody's.
        first = register_optimizer_step_pre_hook(uncompiled(self._before_update))
        yield first.remove
        _global_optimizer_pre_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self._after_all = register_optimizer_step_post_hook(uncompiled(self._updated))
        yield self._after_all.remove
        yield guard_foreign_updates(module, last, known=[*optimizers, *wrappers], events=self._events)
        yield from self._calls.hooks(wrappers, self._events)
        yield module.register_forward_pre_hook(Hook(self._forward_begins), with_kwargs=True).remove
        yield module.register_forward_hook(Hook(self._forwarded)).remove
        bare = [one for one in optimizers if not any(one is wrapper for wrapper in wrappers)]
        yield from hooks_on_loading(module, bare, self._events)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizer:
            self._begin_update()

    def _begin_update(self) -> None:
        # An update without a training forward before it ends the time of the objects too.
        self._next_forward()
        self._events.before_update()
        if next(reversed(_global_optimizer_post_hooks)) != self._after_all.id:
            _global_optimizer_post_hooks.move_to_end(self._after_all.id)  # type: ignore[attr-defined]

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizer and not _is_inner_step(optimizer) and self._calls.ended():
            self._end_step()

    def _end_step(self) -> None:
        self._count()
        self._pace.updated()
        self._events.after_step(applied=True, metrics=self._take_metrics(), batch=self._batches.take())

    def _next_forward(self) -> None:
        # The pace decides whether the scheduler is read now, so it is learned first.
        self._pace.learn()
        self._events.next_forward()

    def _forward_begins(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # An evaluation may run between the update and the scheduler's move, and must not end the step.
        if module is self._module and module.training and torch.is_grad_enabled():
            self._next_forward()
            if self._events.names_batches:
                self._batches.saw_forward(args, kwargs)

    def _forwarded(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        # A shallow copy of the module has the same hooks.
        if module is self._module and module.training:
            loss = loss_in(output)
            if loss is not None:
                self._metrics.add_loss(loss)

    def _take_metrics(self) -> Mapping[str, float | torch.Tensor]:
        metrics = self._metrics.take()
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None:
            metrics["lr"] = rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)
        return metrics


def _is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hook of `optimizer.step` is called from within another `step` of that optimizer.

    torch calls the hooks in the step of every class, so a `step` that calls its parent's runs them twice. The calls
    under way tell, because an exception leaves nothing behind there; a counter of our own would stay wrong after one.
    """
    steps = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and steps < 2:
        steps += frame.f_code.co_qualname == _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2
