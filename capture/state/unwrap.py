"""Unwrapping: the modules, optimizers, schedulers and loaders inside framework wrappers, and their logical names."""

from typing import Any

import torch

__all__ = ["logical_name", "scaler_of", "unwrapped", "unwrapped_loader", "unwrapped_optimizer", "unwrapped_scheduler"]

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_PARTS_OF_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Name components that torch.compile and torch's activation checkpointing insert, at any depth."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile: it has the logical names."""
    while True:
        inner = module.module if isinstance(module, _WRAPPERS) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def logical_name(name: str) -> str:
    """Return the name of a tensor or submodule without the components that wrappers have added to it."""
    return ".".join(part for part in name.split(".") if part not in _PARTS_OF_WRAPPERS)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside wrappers that keep it as `.optimizer` and write nothing themselves, as
    Accelerate's does. One that is an optimizer of its own, such as Lookahead, is returned as it is.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer) and (
        _is_of_accelerate(optimizer) or not isinstance(optimizer, torch.optim.Optimizer)
    ):
        optimizer = optimizer.optimizer
    return optimizer


def scaler_of(optimizer: Any) -> Any:
    """Return the gradient scaler that Accelerate's wrapper of an optimizer calls; None without one."""
    return getattr(optimizer, "scaler", None) if unwrapped_optimizer(optimizer) is not optimizer else None


def unwrapped_scheduler(scheduler: Any) -> Any:
    """Return the scheduler inside Accelerate's wrapper, which itself keeps no state.

    Any other wrapper may keep state, so it is returned as it is.
    """
    return scheduler.scheduler if _is_of_accelerate(scheduler) and hasattr(scheduler, "scheduler") else scheduler


def unwrapped_loader(dataloader: Any) -> Any:
    """Return the data loader inside Accelerate's wrapper, which tells whether there is a position to store.

    The position itself is the wrapper's: the wrapper reads one batch ahead and corrects for that in its own state.
    """
    return dataloader.base_dataloader if _is_of_accelerate(dataloader) else dataloader


def _is_of_accelerate(wrapper: Any) -> bool:
    # Not isinstance: its loaders report the class of the loader inside as their own `__class__`.
    return type(wrapper).__module__.partition(".")[0] == "accelerate"
