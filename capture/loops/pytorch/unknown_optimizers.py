"""Guards against optimizers that the session does not know: the barrier holds for their updates too, with a warning."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from capture.loops.interface import LoopEvents
from capture.loops.module_hooks import uncompiled
from capture.user_warning import warn_user

__all__ = ["guard_foreign_updates"]


def guard_foreign_updates(
    module: torch.nn.Module, last: torch.optim.Optimizer, *, known: Sequence[torch.optim.Optimizer], events: LoopEvents
) -> Callable[[], None]:
    """Wait at the barrier before any optimizer except `last` updates a parameter of `module`, and warn once of each
    that is not among `known`, because a restore does not bring its state back. Return a function that removes the
    guard.
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
                warn_user(
                    f"a {type(optimizer).__qualname__} that is not captured updates {shared[optimizer]} parameters of "
                    "the captured module: a restore will not bring its state back; pass capture.enable(..., "
                    "optimizer=[...]) all optimizers in the order of their updates"
                )
        if shared[optimizer]:
            events.before_access("the update of another optimizer")

    return register_optimizer_step_pre_hook(uncompiled(before)).remove
