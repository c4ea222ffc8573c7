"""A plain torch module with its optimizer as a training loop; a step is one call of `optimizer.step()`."""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from capture.loops.interface import LoopEvents
from capture.loops.pytorch.hooks import Pace, TorchHooks
from capture.state.interface import StateProvider
from capture.state.providers import (
    Buffers,
    Counters,
    ExtraState,
    ModuleParameters,
    Stateful,
    TorchOptimizer,
)
from capture.state.unwrap import scaler_of, unwrapped, unwrapped_optimizer, unwrapped_scheduler
from catalog.errors import SetupError, UnsupportedError

__all__ = ["Optimizers", "TorchLoop", "count_from"]

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of each optimizer: they outlive a session, so that a restore before `enable` sets them too."""

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

    def check_capturable(self) -> None:
        if not self._optimizers:
            raise SetupError("capturing a plain module needs its optimizer: capture.enable(model, optimizer=optimizer)")
        # Every scheduler of torch leaves this mark in the groups it moves.
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if self._scheduler is None and any("initial_lr" in group for group in groups):
            warnings.warn(
                "the optimizer's learning rate is moved by a scheduler that is not captured, so a restore will not bring its state back: "
                "pass capture.enable(..., scheduler=scheduler)",
                stacklevel=6,
            )

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
        hooks = TorchHooks(
            self._module,
            self._optimizers,
            self._pace(),
            rates=frozenset({"lr_scheduler", *_optimizer_names(self._optimizers)}),
            count=self._count,
            events=events,
        )
        return hooks.remove

    def _pace(self) -> Pace:
        return Pace(self._scheduler, self._optimizers[-1])

    def _count(self) -> None:
        _steps[self._optimizers[-1]] = self.step() + 1

    def _counters(self) -> Mapping[str, int]:
        return {"global_steps": self.step(), "scheduler_by_epochs": int(self._pace().by_epochs)}

    def _set_counters(self, counters: Mapping[str, int]) -> None:
        if self._optimizers:
            _steps[self._optimizers[-1]] = int(counters["global_steps"])
            self._pace().by_epochs = bool(counters.get("scheduler_by_epochs", False))


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


def _qualified(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
