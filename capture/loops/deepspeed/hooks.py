"""Hooks into one DeepSpeed engine: instance-level, duck-typed, undone completely, and transparent when others wrap the
same methods.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from capture.loops.deepspeed.engine_provider import loss_scale
from capture.loops.interface import Barrier, LoopEvents
from capture.loops.module_hooks import Hook, hooks_on_loading, install

__all__ = ["Meter", "attach", "attach_barrier", "wrap"]

_MISSING = object()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Make `owner.name(...)` call `around(inner, ...)`, on this instance only; returns what undoes it.

    If somebody has wrapped the method again since, ours stays in the middle of theirs and only passes calls through
    from then on.
    """
    previous = vars(owner).get(name, _MISSING)
    inner = getattr(owner, name)
    active = True

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs) if active else inner(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False
        if vars(owner).get(name) is wrapper:
            if previous is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

    setattr(owner, name, wrapper)
    return undo


class Meter:
    """What a step is worth writing down: loss, learning rate, gradient norm, time. Never waits for the device."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._backward: list[torch.Tensor] = []
        self._forward: list[torch.Tensor] = []
        self._rate: float | torch.Tensor | None = None
        self._began = time.perf_counter()

    def saw_backward(self, loss: Any) -> None:
        """The argument of `engine.backward`, as the user passed it: before any scaling."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._backward.append(loss.detach().clone())

    def saw_forward(self, output: Any) -> None:
        """What forward returned: the loss of those who call `loss.backward()` themselves."""
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            self._forward.append(loss.detach().clone())

    def saw_update(self) -> None:
        """The learning rate of this update: afterwards the scheduler has moved on."""
        rates = self._engine.get_lr()
        self._rate = rates[0] if rates else None

    def take(self) -> Mapping[str, float | torch.Tensor]:
        """The metrics of the step that has just ended; begins the next one."""
        now = time.perf_counter()
        metrics: dict[str, float | torch.Tensor] = {"step_time_s": now - self._began}
        losses = self._backward or self._forward
        if losses:
            metrics["loss"] = torch.stack([loss.float().reshape(()) for loss in losses]).mean()
        elif isinstance(getattr(self._engine, "agg_train_loss", None), torch.Tensor):
            metrics["loss"] = self._engine.agg_train_loss.detach().clone().mean()
        if self._rate is not None:
            metrics["lr"] = self._rate
        norm = self._engine.get_global_grad_norm()
        if norm is not None:
            metrics["grad_norm"] = norm
        scale = loss_scale(self._engine)
        if scale is not None:
            metrics["loss_scale"] = scale
        self._backward, self._forward, self._began = [], [], now
        return metrics


def attach(engine: Any, events: LoopEvents) -> Callable[[], None]:
    """Install every hook of `LoopEvents` on `engine`; returns the detacher, which may be called more than once."""
    meter = Meter(engine)

    def due() -> None:
        meter.saw_update()
        events.before_update()

    def hooks() -> Iterator[Callable[[], None]]:
        yield _before_update(engine.optimizer, due)
        yield from _metrics(engine, meter)
        yield from _steps(engine, events, meter)
        yield from _accesses(engine, events)

    return install(hooks())


def attach_barrier(engine: Any, barrier: Barrier) -> Callable[[], None]:
    """Only the hooks before whatever writes the state; returns the detacher, which may be called more than once."""

    def hooks() -> Iterator[Callable[[], None]]:
        yield _before_update(engine.optimizer, barrier.before_update)
        yield from _accesses(engine, barrier)

    return install(hooks())


def _before_update(optimizer: Any, due: Callable[[], None]) -> Callable[[], None]:
    if isinstance(optimizer, torch.optim.Optimizer):
        # Wrapping `step` of a torch optimizer would make its schedulers warn that they are out of order.
        handle = optimizer.register_step_pre_hook(lambda *_: due())
        return handle.remove

    def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        due()
        return inner(*args, **kwargs)

    return wrap(optimizer, "step", step)


def _metrics(engine: Any, meter: Meter) -> Iterator[Callable[[], None]]:
    def backward(inner: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        meter.saw_backward(loss)
        return inner(loss, *args, **kwargs)

    def forward(module: Any, inputs: Any, output: Any) -> None:
        if engine.module.training:
            meter.saw_forward(output)

    yield wrap(engine, "backward", backward)
    yield engine.register_forward_hook(Hook(forward)).remove


def _steps(engine: Any, events: LoopEvents, meter: Meter) -> Iterator[Callable[[], None]]:
    def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = inner(*args, **kwargs)
        if engine.global_steps != before:
            applied = engine.was_step_applied()
            events.after_step(applied=applied, metrics=meter.take())
        return result

    yield wrap(engine, "train_batch" if engine.pipeline_parallelism else "step", step)


def _accesses(engine: Any, events: Barrier) -> Iterator[Callable[[], None]]:
    optimizer = engine.optimizer
    for name in ("load_checkpoint", "load_module_state_dict"):
        yield wrap(engine, name, _guard(events, name))
    yield wrap(engine, "destroy", _closing(events))
    # Hooks, not wraps, on what users copy: a copied wrap would still act on the original.
    is_torch = isinstance(optimizer, torch.optim.Optimizer)
    yield from hooks_on_loading(engine.module, [optimizer] if is_torch else [], events)
    if not is_torch:
        # On the optimizer, which engine.offload_states() and engine.reload_states() call: so is a direct call caught.
        for name in ("load_state_dict", "offload_states", "reload_states"):
            if hasattr(optimizer, name):
                yield wrap(optimizer, name, _guard(events, name))


def _guard(events: Barrier, what: str) -> Callable[..., Any]:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        events.before_access(what)
        try:
            return inner(*args, **kwargs)
        finally:
            events.layout_changed()

    return around


def _closing(events: Barrier) -> Callable[..., Any]:
    def destroy(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            events.closing()
            events.before_access("destroy")
        finally:
            # What closing has to report must not keep an engine alive.
            inner(*args, **kwargs)

    return destroy
