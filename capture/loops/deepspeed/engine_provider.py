"""The State Provider of a DeepSpeed engine's small state: its counters and the loss scaler.

A restore also discards partial gradients, because they belong to the state that was there before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from capture.state.interface import Available, ReadAt, TensorItem
from catalog.errors import MismatchError
from catalog.records import Placement

__all__ = ["EngineState", "discard_gradients", "has_grad_scaler", "loss_scale"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EngineState:
    """The State Provider of the counters and the loss scaler of `engine`.

    A restore discards partial gradients, so that the training goes on as right after an optimizer step.
    """

    read_at: ReadAt = "before_update"
    is_looked_at = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<EngineState of {type(self._engine).__qualname__} at step {self._engine.global_steps}>"

    def tensors(self) -> Sequence[TensorItem]:
        return ()

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        return {
            "counters": ({name: getattr(self._engine, name) for name in _COUNTERS}, "replicated"),
            "loss_scaler": (_read_scaler(self._engine), "replicated"),
        }

    def prepare(self, available: Available) -> None:
        if self._engine.inside_no_sync_ctxt:
            raise MismatchError(
                "a restore inside engine.no_sync() would mix its gradients with the restored state; leave the context "
                "first"
            )

    def finish(self, available: Available) -> None:
        discard_gradients(self._engine)
        for name, value in available.objects.get("counters", {}).items():
            if name in _COUNTERS:
                setattr(self._engine, name, value)
        if "loss_scaler" in available.objects:
            _write_scaler(self._engine, available.objects["loss_scaler"])
        scheduler = self._engine.lr_scheduler
        if hasattr(scheduler, "_last_lr"):
            # DeepSpeed's schedulers do not store the rates that they set last. The param groups have been restored by
            # now.
            scheduler._last_lr = [group["lr"] for group in self._engine.optimizer.param_groups]


def loss_scale(engine: Any) -> float | None:
    """Return the current loss scale; None where losses are not scaled."""
    scaler = _grad_scaler(engine)
    if scaler is not None:
        return float(scaler.get_scale())
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None


def discard_gradients(engine: Any) -> None:
    """Discard every trace of backward passes since the last update, as DeepSpeed does when an overflow skips one."""
    optimizer = engine.optimizer
    engine.zero_grad()
    engine._unmanaged_backward_count = 0
    if hasattr(optimizer, "zero_grad"):
        optimizer.zero_grad()
    if hasattr(optimizer, "averaged_gradients"):
        if hasattr(optimizer, "all_grad_tensors"):
            # ZeRO 1 and 2 expect the keys, one per group, to stay. With -1 the next backward overwrites the
            # accumulation buffers instead of adding to them.
            optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))
            optimizer.all_grad_tensors.update(dict.fromkeys(optimizer.all_grad_tensors))
            optimizer.micro_step_id = -1
        else:
            optimizer.averaged_gradients = {}
        if hasattr(optimizer, "norm_for_param_grads"):
            optimizer.reset_cpu_buffers()
    for pending in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        getattr(optimizer, pending, set()).clear()


def has_grad_scaler(engine: Any) -> bool:
    """Return whether a scaler of torch's is around the optimizer, and gives it more than gradients."""
    return _grad_scaler(engine) is not None


def _grad_scaler(engine: Any) -> Any:
    """Return torch's GradScaler, which DeepSpeed uses under fp16 autocast; None without one."""
    return engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _scaler_of(engine: Any) -> Any:
    return getattr(engine.optimizer, "loss_scaler", None) or getattr(engine.optimizer, "loss_scale_config", None)


def _is_dynamic(scaler: Any) -> bool:
    return bool(getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False))


def _read_scaler(engine: Any) -> dict[str, Any]:
    grad_scaler, scaler = _grad_scaler(engine), _scaler_of(engine)
    return {
        "dynamic": _is_dynamic(scaler),
        "scaler": {key: getattr(scaler, key) for key in _SCALER_STATE if hasattr(scaler, key)},
        "grad_scaler": None if grad_scaler is None else grad_scaler.state_dict(),
    }


def _write_scaler(engine: Any, saved: Mapping[str, Any]) -> None:
    scaler, grad_scaler = _scaler_of(engine), _grad_scaler(engine)
    if _is_dynamic(scaler) == saved["dynamic"]:
        # Only the state is restored. The other attributes of the scaler are this engine's configuration.
        for key in saved["scaler"].keys() & vars(scaler).keys() if scaler is not None else ():
            setattr(scaler, key, saved["scaler"][key])
    if grad_scaler is not None and saved["grad_scaler"] is not None:
        grad_scaler.load_state_dict(saved["grad_scaler"])
