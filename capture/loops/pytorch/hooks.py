"""When a step of a plain loop begins, is over and is settled, told by torch's hooks.

The weights of step n belong with the scheduler's and the scaler's n-th move, and those follow `optimizer.step()`. So a step
ends there, and is *settled* when the next training forward (or the barrier) begins: what can move in between, and nothing
else, is read then. A scheduler that moves by epochs is an exception: the loop that is resumed at an epoch's last step
moves it itself, so the step keeps the state from before. It shows by its not moving after some update.
"""

import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from capture.loops.interface import LoopEvents
from capture.loops.module_hooks import Hook, hooks_on_loading, install
from capture.loops.pytorch.unknown_optimizers import guard_foreign_updates

__all__ = ["Pace", "TorchHooks"]

_by_epochs: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
"""Whether the scheduler of an optimizer was seen not to move with an update."""

_NEVER: Final = object()

_STEP: Final = "Optimizer.profile_hook_step.<locals>.wrapper"
"""What torch makes of the `step` of every class of optimizers."""


class Pace:
    """Whether the scheduler has moved after every update so far; known across sessions and restores, as steps are."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._at_update: Any = _NEVER

    @property
    def by_epochs(self) -> bool:
        return _by_epochs.get(self._optimizer, False)

    @by_epochs.setter
    def by_epochs(self, by_epochs: bool) -> None:
        _by_epochs[self._optimizer] = by_epochs

    def updated(self) -> None:
        self._at_update = self._position()

    def learn(self) -> None:
        """By now the scheduler has moved, if it moves with updates at all."""
        if self._at_update is not _NEVER and self._position() == self._at_update:
            self.by_epochs = True
        self._at_update = _NEVER

    def _position(self) -> Any:
        """What tells two positions apart: a count, or for schedulers without one their whole state."""
        if hasattr(self.scheduler, "last_epoch"):
            return self.scheduler.last_epoch
        return repr(self.scheduler.state_dict()) if hasattr(self.scheduler, "state_dict") else None


class TorchHooks:
    """The hooks of one session on a module and its optimizers, from now until `remove` is called.

    count: called at the end of each step, before the session hears of it
    rates: the objects that a scheduler moves, its own among them
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        pace: Pace,
        *,
        rates: frozenset[str],
        count: Callable[[], None],
        events: LoopEvents,
    ) -> None:
        self._module = module
        self._pace = pace
        self._clock = _StepClock(optimizers[-1])
        self._rates = rates
        self._count = count
        self._events = events
        self.remove = install(self._hooks(module, optimizers))

    def _hooks(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[Callable[[], None]]:
        last = optimizers[-1]
        yield last.register_step_pre_hook(self._before_update).remove
        yield last.register_step_post_hook(self._updated).remove
        yield guard_foreign_updates(module, last, known=optimizers, events=self._events)
        yield module.register_forward_pre_hook(Hook(self._forward_begins)).remove
        yield module.register_forward_hook(Hook(self._forwarded)).remove
        yield from hooks_on_loading(module, optimizers, self._events)

    def _before_update(self, *_: Any) -> None:
        self._settle()
        self._events.before_update()

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _is_inner_step(optimizer):
            return
        self._count()
        keep = frozenset() if self._pace.scheduler is None or not self._pace.by_epochs else self._rates
        self._pace.updated()
        self._events.after_step(applied=True, metrics=self._clock.tick(), moving=self._moved, keep=keep)

    def _moved(self) -> frozenset[str]:
        return frozenset({"loss_scaler"}) | (frozenset() if self._pace.by_epochs else self._rates)

    def _settle(self) -> None:
        self._pace.learn()
        self._events.settled()

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        # An evaluation between the update and the scheduler's move says nothing about either.
        if module is self._module and module.training and torch.is_grad_enabled():
            self._settle()

    def _forwarded(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        # A shallow copy has the same hooks.
        if module is self._module and module.training:
            self._clock.saw(output)


def _is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of `optimizer.step` is called from within another `step` of that optimizer: torch calls the hooks in the step of every
    class, so one that calls its parent's runs them twice. Told by the calls under way, of which an exception leaves nothing
    behind.
    """
    steps = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and steps < 2:
        steps += frame.f_code.co_qualname == _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2


class _StepClock:
    """What a plain loop tells of a step: its time, its learning rate, and its loss where forward returns it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._began = time.perf_counter()
        self._losses: list[torch.Tensor] = []

    def saw(self, output: Any) -> None:
        """A forward's output: a 0-dim tensor that can be differentiated, or something with such a `.loss`, is the loss. A
        prediction of one element is none.
        """
        loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad and _has_a_value(loss):
            self._losses.append(loss.detach().clone().reshape(()))

    def tick(self) -> Mapping[str, float | torch.Tensor]:
        now = time.perf_counter()
        metrics: dict[str, float | torch.Tensor] = {"step_time_s": now - self._began}
        self._began = now
        if self._losses:
            metrics["loss"] = torch.stack(self._losses).mean()
            self._losses = []
        rate = self._optimizer.param_groups[0].get("lr")
        if rate is not None:
            metrics["lr"] = rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)
        return metrics


def _has_a_value(loss: torch.Tensor) -> bool:
    """Whether it is one real number, not what stands for many or none while torch transforms or traces a function."""
    traced = loss.is_meta or isinstance(loss, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(loss)
    return loss.is_floating_point() and not traced
