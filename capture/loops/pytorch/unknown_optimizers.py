"""Updates by optimizers that the session was not told of: the barrier holds for them too, and it is said once."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from capture.loops.interface import LoopEvents

__all__ = ["guard_foreign_updates"]


def guard_foreign_updates(
    module: torch.nn.Module, last: torch.optim.Optimizer, *, known: Sequence[torch.optim.Optimizer], events: LoopEvents
) -> Callable[[], None]:
    """Raise the barrier before any optimizer but `last` updates a parameter of `module`, and warn once of each that is
    not among `known`, for a restore does not bring its state back. Returns what removes the guard.
    """
    shared: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is last:
            return
        if optimizer not in shared:
            ours = {id(parameter) for parameter in module.parameters()}
            groups = optimizer.param_groups
            shared[optimizer] = sum(id(parameter) in ours for group in groups for parameter in group["params"])
            if shared[optimizer] and not any(optimizer is one for one in known):
                warnings.warn(
                    f"a {type(optimizer).__qualname__} that is not captured updates {shared[optimizer]} parameters of the captured "
                    "module: a restore will not bring its state back; pass capture.enable(..., optimizer=[...]) all optimizers in "
                    "the order of their updates",
                    stacklevel=3,
                )
        if shared[optimizer]:
            events.before_access("the update of another optimizer")

    return register_optimizer_step_pre_hook(before).remove
