"""Finds the kind of loop of a target. DeepSpeed is used only when the training itself has imported it."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from capture.loops.interface import Loop
from capture.loops.pytorch.loop import Optimizers, TorchLoop
from catalog.errors import SetupError

__all__ = ["loop_for", "trainer_target"]


def loop_for(target: Any, *, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None) -> Loop:
    """Return the Loop of a DeepSpeed engine, or of a torch module with its optimizers, scheduler and gradient scaler.
    SetupError for anything else.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(target, deepspeed.DeepSpeedEngine):
        if optimizer is not None or scheduler is not None or scaler is not None:
            raise SetupError(
                "a DeepSpeed engine has its own optimizer, scheduler and scaler: leave out optimizer=, scheduler= and "
                "scaler="
            )
        from capture.loops.deepspeed.loop import DeepSpeedLoop

        return DeepSpeedLoop(target)
    if isinstance(target, torch.nn.Module):
        return TorchLoop(target, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    raise SetupError(f"expected a DeepSpeed engine or a torch.nn.Module, got {type(target).__qualname__}")


def trainer_target(model: torch.nn.Module, *, optimizer: Any, scheduler: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the target and the further arguments of `capture.enable` for a trainer whose callbacks get the bare model
    and Accelerate's wrappers of the optimizer and scheduler.
    """
    if "deepspeed" in sys.modules:
        from capture.loops.deepspeed.loop import engine_of

        engine = engine_of(optimizer)
        if engine is not None:
            return engine, {}
    return model, {"optimizer": optimizer, "scheduler": scheduler}
