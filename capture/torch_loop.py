"""A plain torch module with its optimizer as a training loop; a step is one call of `optimizer.step()`.

When is a step over? The weights of step n belong with the scheduler's and the scaler's n-th move, and those follow
`optimizer.step()`. So a step ends there, and is *settled* when the next forward (or barrier) begins: what can move in
between, and nothing else, is read then. A scheduler that moves by epochs is an exception: the loop that is resumed at an
epoch's last step moves it itself, so the step keeps the state from before. It shows by its not moving after some update.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from capture.items import StateProvider
from capture.loop import LoopEvents
from capture.providers import Buffers, Counters, ModuleParameters, Stateful, TorchOptimizer
from catalog.errors import SetupError, UnsupportedError

__all__ = ["TorchLoop"]

_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""Steps of each optimizer: they outlive a session, so that a restore before `enable` sets them too."""


class TorchLoop:
    """The Loop of `module`; without an optimizer it can be restored, not captured."""

    def __init__(
        self, module: torch.nn.Module, *, optimizer: torch.optim.Optimizer | None, scheduler: Any, scaler: Any
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedError(f"optimizer: expected a torch.optim.Optimizer, got a {_qualified(optimizer)}")
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scaler = scaler

    def step(self) -> int:
        return _steps.get(self._optimizer, 0) if self._optimizer is not None else 0

    def ranks(self) -> tuple[int, int]:
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def providers(self) -> Sequence[StateProvider]:
        found: list[StateProvider] = [ModuleParameters(self._module), Buffers(self._module)]
        if self._optimizer is not None:
            found.append(TorchOptimizer(self._optimizer, self._module))
            found.append(Counters(lambda: {"global_steps": self.step()}, self._set_counters))
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
            "optimizer": _qualified(self._optimizer),
            "scheduler": None if self._scheduler is None else _qualified(self._scheduler),
            "data_parallel_size": self.ranks()[1],
        }

    def attach(self, events: LoopEvents) -> Callable[[], None]:
        optimizer = self._optimizer
        if optimizer is None:
            raise SetupError("capturing a plain module needs its optimizer: capture.enable(model, optimizer=optimizer)")
        clock = _StepClock(optimizer)
        pace = _Pace(self._scheduler)

        def updated(*_: Any) -> None:
            _steps[optimizer] = self.step() + 1
            pace.updated()
            events.after_step(applied=True, metrics=clock.tick(), settled=False)

        def forwarded(module: torch.nn.Module, _: Any, output: Any) -> None:
            if module.training:
                clock.saw(output)

        def before(*_: Any) -> None:
            events.settled(moved=pace.moves_with_updates())
            events.before_update()

        def loading(*_: Any) -> None:
            events.before_access("load_state_dict")

        undo = [
            optimizer.register_step_pre_hook(before).remove,
            optimizer.register_step_post_hook(updated).remove,
            optimizer.register_load_state_dict_pre_hook(loading).remove,
            optimizer.register_load_state_dict_post_hook(lambda *_: events.layout_changed()).remove,
            self._module.register_forward_pre_hook(lambda *_: events.settled(moved=pace.moves_with_updates())).remove,
        ]
        undo.append(self._module.register_forward_hook(forwarded).remove)
        for part in self._module.modules():
            undo.append(part.register_load_state_dict_pre_hook(loading).remove)  # type: ignore[no-untyped-call]

        def detach() -> None:
            while undo:
                undo.pop()()

        return detach

    def _set_counters(self, counters: Mapping[str, int]) -> None:
        if self._optimizer is not None:
            _steps[self._optimizer] = int(counters["global_steps"])


class _Pace:
    """Whether the scheduler has moved after every update so far."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._at_update: Any = None
        self._always = True

    def updated(self) -> None:
        self._at_update = self._position()

    def moves_with_updates(self) -> bool:
        if self._at_update is not None:
            self._always = self._always and self._position() != self._at_update
            self._at_update = None
        return self._always

    def _position(self) -> Any:
        return getattr(self._scheduler, "last_epoch", None)


class _StepClock:
    """What a plain loop tells of a step: its time, its learning rate, and its loss where forward returns it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._began = time.perf_counter()
        self._losses: list[torch.Tensor] = []

    def saw(self, output: Any) -> None:
        """A forward's output: a scalar that can be differentiated, or something with such a `.loss`, is the loss."""
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
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
