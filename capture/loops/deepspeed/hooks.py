"""The hooks on one DeepSpeed engine: on the instance, duck-typed, removed completely, and transparent when others wrap
the same methods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from capture.loops.batch_digest import BatchDigests
from capture.loops.deepspeed.engine_provider import loss_scale
from capture.loops.interface import Barrier, LoopEvents
from capture.loops.module_hooks import Hook, hooks_on_loading, install, uncompiled, wrap
from capture.loops.step_metrics import Losses, StepMetrics, loss_in

__all__ = ["attach", "attach_barrier"]


class _EngineMetrics:
    """The metrics of an engine's steps: loss, learning rate, gradient norm, loss scale, time. Never waits for the
    device.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._metrics = StepMetrics()
        self._forward = Losses()
        self._rate: float | torch.Tensor | None = None

    def saw_backward(self, loss: Any) -> None:
        """Take the argument of `engine.backward`, as the user passed it: before any scaling."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._metrics.add_loss(loss)

    def saw_forward(self, output: Any) -> None:
        """Take the loss that forward returned, for loops that call `loss.backward()` themselves."""
        if isinstance(output, torch.Tensor) and output.numel() == 1:
            output = output.reshape(())
        loss = loss_in(output)
        if loss is not None:
            self._forward.add(loss)

    def saw_update(self) -> None:
        """Take the learning rate of this update: afterwards the scheduler has advanced."""
        rates = self._engine.get_lr()
        self._rate = rates[0] if rates else None

    def take(self) -> Mapping[str, float | torch.Tensor]:
        """Return the metrics of the step that has just ended; begin the next one."""
        metrics = self._metrics.take()
        of_forward = self._forward.take_mean()
        if of_forward is not None:
            metrics.setdefault("loss", of_forward)
        if "loss" not in metrics and isinstance(getattr(self._engine, "agg_train_loss", None), torch.Tensor):
            metrics["loss"] = self._engine.agg_train_loss.detach().clone().mean()
        if self._rate is not None:
            metrics["lr"] = self._rate
        norm = self._engine.get_global_grad_norm()
        if norm is not None:
            metrics["grad_norm"] = norm
        scale = loss_scale(self._engine)
        if scale is not None:
            metrics["loss_scale"] = scale
        return metrics


def attach(engine: Any, events: LoopEvents) -> Callable[[], None]:
    """Install every hook of `LoopEvents` on `engine`; return an idempotent function that removes them."""
    metrics = _EngineMetrics(engine)

    def due() -> None:
        metrics.saw_update()
        events.before_update()

    def hooks() -> Iterator[Callable[[], None]]:
        yield _before_update(engine.optimizer, due)
        yield from _metrics(engine, metrics)
        yield from _steps(engine, events, metrics)
        yield from _accesses(engine, events)

    return install(hooks())


def attach_barrier(engine: Any, barrier: Barrier) -> Callable[[], None]:
    """Install only the hooks before whatever writes the state; return a function that removes them, which may be called
    again.
    """

    def hooks() -> Iterator[Callable[[], None]]:
        yield _before_update(engine.optimizer, barrier.before_update)
        yield from _accesses(engine, barrier)

    return install(hooks())


def _before_update(optimizer: Any, due: Callable[[], None]) -> Callable[[], None]:
    if isinstance(optimizer, torch.optim.Optimizer):
        # Wrapping `step` of a torch optimizer would make its schedulers warn that they are out of order. Hooks on all
        # optimizers run before those on this one, whose order may still be changed then.
        before = uncompiled(lambda one, *_: due() if one is optimizer else None)
        handle = register_optimizer_step_pre_hook(before)
        return handle.remove

    def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        due()
        return inner(*args, **kwargs)

    return wrap(optimizer, "step", step)


def _metrics(engine: Any, metrics: _EngineMetrics) -> Iterator[Callable[[], None]]:
    def backward(inner: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        metrics.saw_backward(loss)
        return inner(loss, *args, **kwargs)

    def forward(module: Any, inputs: Any, output: Any) -> None:
        if engine.module.training:
            metrics.saw_forward(output)

    yield wrap(engine, "backward", backward)
    yield engine.register_forward_hook(Hook(forward)).remove


def _steps(engine: Any, events: LoopEvents, metrics: _EngineMetrics) -> Iterator[Callable[[], None]]:
    batches = BatchDigests()

    def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        if engine.pipeline_parallelism:
            # Its forward is none that a hook sees.
            events.next_forward()
        result = inner(*args, **kwargs)
        if engine.global_steps != before:
            applied = engine.was_step_applied()
            events.after_step(applied=applied, metrics=metrics.take(), batch=batches.take())
        return result

    def forward_begins(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # An evaluation may run between two steps, and must not end the first one.
        if engine.module.training and torch.is_grad_enabled():
            events.next_forward()
            if events.names_batches:
                batches.saw_forward(args, kwargs)

    yield wrap(engine, "train_batch" if engine.pipeline_parallelism else "step", step)
    yield engine.register_forward_pre_hook(Hook(forward_begins), with_kwargs=True).remove


def _accesses(engine: Any, events: Barrier) -> Iterator[Callable[[], None]]:
    optimizer = engine.optimizer
    for name in ("load_checkpoint", "load_module_state_dict"):
        yield wrap(engine, name, _guard(events, name))
    yield wrap(engine, "destroy", _closing(events))
    # Hooks, not wraps, on what users copy: a copied wrap would still act on the original.
    is_torch = isinstance(optimizer, torch.optim.Optimizer)
    yield from hooks_on_loading(engine.module, [optimizer] if is_torch else [], events)
    if not is_torch:
        # On the optimizer, because engine.offload_states() and engine.reload_states() call it: a direct call is
        # caught too.
        for name in ("load_state_dict", "offload_states", "reload_states"):
            if hasattr(optimizer, name):
                yield wrap(optimizer, name, _guard(events, name))
        yield from _writes_by_parameter(engine, events)


def _writes_by_parameter(engine: Any, events: Barrier) -> Iterator[Callable[[], None]]:
    """Yield hooks on what DeepSpeed's `safe_set_full_fp32_param` and its siblings call, however a script has imported
    them: methods of the optimizer under ZeRO 3, elsewhere a function on each parameter, made anew at every linking.
    """
    optimizer = engine.optimizer
    for name in ("set_full_hp_param", "set_local_hp_param"):
        if hasattr(optimizer, name):
            yield wrap(optimizer, name, _edit(events, name))
    undo: list[Callable[[], None]] = []

    def release() -> None:
        while undo:
            undo.pop()()

    def guard() -> None:
        release()
        name = "set_full_hp_param"
        linked = [parameter for parameter in engine.module.parameters() if name in vars(parameter)]
        undo.extend(wrap(parameter, name, _edit(events, name)) for parameter in linked)

    def link(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        guard()
        return result

    if hasattr(optimizer, "_link_all_hp_params"):
        yield wrap(optimizer, "_link_all_hp_params", link)
    guard()
    yield release


def _guard(events: Barrier, what: str) -> Callable[..., Any]:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        events.before_access(what)
        try:
            return inner(*args, **kwargs)
        finally:
            events.layout_changed()

    return around


def _edit(events: Barrier, what: str) -> Callable[..., Any]:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with events.editing(what):
            return inner(*args, **kwargs)

    return around


def _closing(events: Barrier) -> Callable[..., Any]:
    def destroy(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            events.closing()
            events.before_access("destroy")
        finally:
            # A failure that closing reports must not keep the engine from being destroyed.
            inner(*args, **kwargs)

    return destroy
