"""A plain torch module with its optimizer as a training loop; a step is one call of `optimizer.step()`.

When is a step over? The state that goes with the weights of step n includes the scheduler's n-th move, which follows
`optimizer.step()`. So with a scheduler that moves at every update, the step is over when `scheduler.step()` returns;
otherwise when `optimizer.step()` does. Which it is shows after the first update: if a forward pass comes before the
scheduler has moved, it moves by epochs, and a snapshot that was due waits for the next step.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from capture.items import Available, StateProvider, TensorItem
from capture.loop import LoopEvents
from capture.providers import Buffers, ModuleParameters, Stateful, TorchOptimizer
from catalog.records import Placement

__all__ = ["TorchLoop"]

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of each optimizer: they outlive a session, so that a restore before `enable` sets them too."""


class TorchLoop:
    """The Loop of `module`; without an optimizer it can be restored, not captured."""

    def __init__(self, module: torch.nn.Module, *, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler

    def step(self) -> int:
        return _steps.get(self._optimizer, 0) if self._optimizer is not None else 0

    def ranks(self) -> tuple[int, int]:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def providers(self) -> Sequence[StateProvider]:
        found: list[StateProvider] = [ModuleParameters(self._module), Buffers(self._module)]
        if self._optimizer is not None:
            found.append(TorchOptimizer(self._optimizer, self._module))
        if self._scheduler is not None:
            found.append(Stateful("lr_scheduler", self._scheduler))
        if self._optimizer is not None:
            found.append(_Counters(self._optimizer))
        return found

    def facts(self) -> Mapping[str, Any]:
        return {
            "engine": "torch",
            "torch": torch.__version__,
            "module": _qualified(self._module),
            "optimizer": _qualified(self._optimizer),
            "scheduler": None if self._scheduler is None else _qualified(self._scheduler),
            "data_parallel_size": self.ranks()[1],
        }

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        assert self._optimizer is not None
        return _Hooks(self._module, self._optimizer, self._scheduler, events).detach


class _Counters:
    """The step counter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {"counters": ({"global_steps": _steps.get(self._optimizer, 0)}, "replicated")}

    def prepare(self, available: Available) -> None:
        """Nothing to make."""

    def finish(self, available: Available) -> None:
        if "counters" in available.objects:
            _steps[self._optimizer] = int(available.objects["counters"]["global_steps"])


class _Hooks:
    """The hooks of one session."""

    def __init__(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, events: LoopEvents
    ) -> None:
        self._optimizer = optimizer
        self._events = events
        self._moves_with_updates = scheduler is not None
        self._unfinished = False
        self._began = time.perf_counter()
        self._undo: list[Callable[[], None]] = [
            optimizer.register_step_pre_hook(lambda *_: self._before_update()).remove,
            optimizer.register_step_post_hook(lambda *_: self._updated()).remove,
            optimizer.register_load_state_dict_pre_hook(lambda *_: events.before_access("load_state_dict")).remove,
            optimizer.register_load_state_dict_post_hook(lambda *_: events.layout_changed()).remove,
            module.register_forward_pre_hook(self._forward).remove,
        ]
        for part in module.modules():
            guard = part.register_load_state_dict_pre_hook(lambda *_: events.before_access("load_state_dict"))
            self._undo.append(guard.remove)
        if scheduler is not None:
            self._undo.append(_observe(scheduler, self._scheduler_moved))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _before_update(self) -> None:
        self._scheduler_stood_still()
        self._events.before_update()

    def _updated(self) -> None:
        _steps[self._optimizer] = _steps.get(self._optimizer, 0) + 1
        if self._moves_with_updates:
            self._unfinished = True
        else:
            self._finish(applied=True)

    def _scheduler_moved(self) -> None:
        if self._unfinished:
            self._finish(applied=True)

    def _forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._scheduler_stood_still()

    def _scheduler_stood_still(self) -> None:
        if self._unfinished:
            self._moves_with_updates = False
            self._finish(applied=False)

    def _finish(self, *, applied: bool) -> None:
        self._unfinished = False
        now = time.perf_counter()
        rate = self._optimizer.param_groups[0]["lr"]
        metrics = {
            "step_time_s": now - self._began,
            "lr": rate.detach().clone() if isinstance(rate, torch.Tensor) else rate,
        }
        self._began = now
        self._events.after_step(applied=applied, metrics=metrics)


def _observe(scheduler: Any, moved: Callable[[], None]) -> Callable[[], None]:
    """Call `moved` after each `scheduler.step()`; returns what undoes it.

    By a subclass and not by an attribute, for schedulers put all their attributes into their state_dict.
    """
    plain = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain.step(self, *args, **kwargs)
        moved()
        return result

    scheduler.__class__ = type(plain.__name__, (plain,), {"step": step, "__module__": plain.__module__})

    def undo() -> None:
        scheduler.__class__ = plain

    return undo


def _qualified(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
