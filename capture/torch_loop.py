"""A plain torch module with its optimizer as a training loop; a step is one call of `optimizer.step()`.

When is a step over? The weights of step n belong with the scheduler's and the scaler's n-th move, and those follow
`optimizer.step()`. So a step ends there, and is *settled* when the next training forward (or the barrier) begins: what
can move in between, and nothing else, is read then. A scheduler that moves by epochs is an exception: the loop that is
resumed at an epoch's last step moves it itself, so the step keeps the state from before. It shows by its not moving after
some update.
"""

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from capture.foreign import guard_foreign_updates
from capture.items import StateProvider
from capture.loop import LoopEvents
from capture.providers import (
    Buffers,
    Counters,
    ExtraState,
    ModuleParameters,
    Stateful,
    TorchOptimizer,
)
from capture.unwrap import scaler_of, unwrapped, unwrapped_optimizer, unwrapped_scheduler
from catalog.errors import SetupError, UnsupportedError

__all__ = ["Optimizers", "TorchLoop", "count_from"]

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of each optimizer: they outlive a session, so that a restore before `enable` sets them too."""

_by_epochs: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
"""Whether the scheduler of an optimizer was seen not to move with an update."""

_NEVER = object()


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class TorchLoop:
    """The Loop of `module`; without an optimizer it can be restored, not captured. Of several optimizers the last one
    ends a step.
    """

    def __init__(self, module: torch.nn.Module, *, optimizer: Optimizers, scheduler: Any, scaler: Any) -> None:
        self._module = module
        self._optimizers = _optimizers(optimizer)
        self._scheduler = unwrapped_scheduler(scheduler)
        self._scaler = scaler if scaler is not None else scaler_of(optimizer)

    def step(self) -> int:
        return _steps.get(self._optimizers[-1], 0) if self._optimizers else 0

    def subjects(self) -> Sequence[Any]:
        return [unwrapped(self._module), *self._optimizers]

    def ranks(self) -> tuple[int, int]:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def providers(self) -> Sequence[StateProvider]:
        found: list[StateProvider] = [ModuleParameters(self._module), Buffers(self._module), ExtraState(self._module)]
        names = _optimizer_names(self._optimizers)
        found += [
            TorchOptimizer(one, self._module, name=name) for one, name in zip(self._optimizers, names, strict=True)
        ]
        if self._optimizers:
            found.append(Counters(self._counters, self._set_counters))
        if self._scheduler is not None:
            found.append(Stateful("lr_scheduler", self._scheduler))
        if self._scaler is not None:
            found.append(Stateful("loss_scaler", self._scaler))
        return found

    def facts(self) -> Mapping[str, Any]:
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "module": _qualified(self._module),
            "optimizer": ", ".join(map(_qualified, self._optimizers)) or None,
            "scheduler": None if self._scheduler is None else _qualified(self._scheduler),
            "data_parallel_size": self.ranks()[1],
        }

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        if not self._optimizers:
            raise SetupError("capturing a plain module needs its optimizer: capture.enable(model, optimizer=optimizer)")
        self._warn_of_a_schedule()
        last = self._optimizers[-1]
        clock = _StepClock(last)
        pace = _Pace(self._scheduler, last)
        # torch hooks the step of every class, so one that calls its parent's runs the hooks twice.
        depth = 0
        rates = frozenset({"lr_scheduler", *_optimizer_names(self._optimizers)})

        def updated(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth > 0:
                return
            _steps[last] = self.step() + 1
            keep = frozenset() if self._scheduler is None or pace.with_updates else rates
            pace.updated()
            events.after_step(applied=True, metrics=clock.tick(), moving=moved, keep=keep)

        def moved() -> frozenset[str]:
            return frozenset({"loss_scaler"}) | (rates if pace.with_updates else frozenset())

        def settle() -> None:
            pace.learn()
            events.settled()

        def forward_begins(module: torch.nn.Module, _: Any) -> None:
            # An evaluation between the update and the scheduler's move says nothing about either.
            nonlocal depth
            if module.training and torch.is_grad_enabled():
                depth = 0
                settle()

        def forwarded(module: torch.nn.Module, _: Any, output: Any) -> None:
            if module.training:
                clock.saw(output)

        def before(*_: Any) -> None:
            nonlocal depth
            depth = max(depth, 0) + 1
            settle()
            events.before_update()

        def loading(*_: Any) -> None:
            events.before_access("load_state_dict")

        undo = [
            last.register_step_pre_hook(before).remove,
            last.register_step_post_hook(updated).remove,
            guard_foreign_updates(self._module, last, known=self._optimizers, events=events),
            self._module.register_forward_pre_hook(forward_begins).remove,
            self._module.register_forward_hook(forwarded).remove,
        ]
        for optimizer in self._optimizers:
            undo.append(optimizer.register_load_state_dict_pre_hook(loading).remove)
            undo.append(optimizer.register_load_state_dict_post_hook(lambda *_: events.layout_changed()).remove)
        for part in self._module.modules():
            undo.append(part.register_load_state_dict_pre_hook(loading).remove)  # type: ignore[no-untyped-call]

        def detach() -> None:
            while undo:
                undo.pop()()

        return detach

    def _warn_of_a_schedule(self) -> None:
        # Every scheduler of torch leaves this mark in the groups it moves.
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if self._scheduler is None and any("initial_lr" in group for group in groups):
            warnings.warn(
                "the optimizer's learning rate is moved by a scheduler that is not captured, so a restore will not bring its state back: "
                "pass capture.enable(..., scheduler=scheduler)",
                stacklevel=5,
            )

    def _counters(self) -> Mapping[str, int]:
        return {"global_steps": self.step(), "scheduler_by_epochs": int(_by_epochs.get(self._optimizers[-1], False))}

    def _set_counters(self, counters: Mapping[str, int]) -> None:
        if self._optimizers:
            _steps[self._optimizers[-1]] = int(counters["global_steps"])
            _by_epochs[self._optimizers[-1]] = bool(counters.get("scheduler_by_epochs", False))


def count_from(optimizer: Any, step: int) -> None:
    """Number the steps of `optimizer` on from `step`, as the loop around it does."""
    _steps[unwrapped_optimizer(optimizer)] = step


def _optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers in the order of their updates, out of the wrappers that others put around them."""
    several = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    found = []
    for optimizer in several:
        optimizer = unwrapped_optimizer(optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError(f"optimizer: expected a torch.optim.Optimizer, got a {_qualified(optimizer)}")
        found.append(optimizer)
    return tuple(found)


def _optimizer_names(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    return [f"optimizer.{i}" if i else "optimizer" for i in range(len(optimizers))]


class _Pace:
    """Whether the scheduler has moved after every update so far; known across sessions and restores, as steps are."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._at_update: Any = _NEVER

    @property
    def with_updates(self) -> bool:
        return not _by_epochs.get(self._optimizer, False)

    def updated(self) -> None:
        self._at_update = self._position()

    def learn(self) -> None:
        """By now the scheduler has moved, if it moves with updates at all."""
        if self._at_update is not _NEVER and self._position() == self._at_update:
            _by_epochs[self._optimizer] = True
        self._at_update = _NEVER

    def _position(self) -> Any:
        """What tells two positions apart: a count, or for schedulers without one their whole state."""
        if hasattr(self._scheduler, "last_epoch"):
            return self._scheduler.last_epoch
        return repr(self._scheduler.state_dict()) if hasattr(self._scheduler, "state_dict") else None


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
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
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


def _qualified(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
