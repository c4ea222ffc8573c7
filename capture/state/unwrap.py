"""Out of what frameworks put around modules, optimizers and schedulers: the objects themselves and their logical names."""

from typing import Any

import torch

__all__ = ["logical_name", "scaler_of", "unwrapped", "unwrapped_loader", "unwrapped_optimizer", "unwrapped_scheduler"]

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_PARTS_OF_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The parts of a name that torch.compile and torch's activation checkpointing add, at any depth."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile, whose names are the logical ones."""
    while True:
        inner = module.module if isinstance(module, _WRAPPERS) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def logical_name(name: str) -> str:
    """The name that a tensor or a submodule has without the wrappers on the way to it."""
    return ".".join(part for part in name.split(".") if part not in _PARTS_OF_WRAPPERS)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside wrappers that keep it as `.optimizer`, such as Accelerate's: the one whose `step` updates."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def scaler_of(optimizer: Any) -> Any:
    """The gradient scaler that Accelerate's wrapper of an optimizer calls; None without one."""
    return getattr(optimizer, "scaler", None) if unwrapped_optimizer(optimizer) is not optimizer else None


def unwrapped_scheduler(scheduler: Any) -> Any:
    """The scheduler inside Accelerate's wrapper, which has no state of its own. Other wrappers may have: they stay."""
    return scheduler.scheduler if _is_of_accelerate(scheduler) and hasattr(scheduler, "scheduler") else scheduler


def unwrapped_loader(dataloader: Any) -> Any:
    """The data loader inside Accelerate's wrapper, which reads a batch ahead and accounts for that in its own state."""
    return dataloader.base_dataloader if _is_of_accelerate(dataloader) else dataloader


def _is_of_accelerate(wrapper: Any) -> bool:
    # Its loaders claim the class of the loader inside.
    return type(wrapper).__module__.partition(".")[0] == "accelerate"
