"""Other learning rates for the updates of a replay, whatever sets the scheduled ones: a scheduler, an engine, or the
training script itself.

Before an update the rate of every group becomes the changed one; when the step is over the scheduled one is there
again, because many schedulers compute their next rate from the one that stands in the group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["ChangedRates"]


class ChangedRates:
    """Changes the rates of every update of these optimizers, until `remove` is called.

    changed: returns the rate of an update for the scheduled one, a number, or a tensor where the optimizer keeps one
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], changed: Callable[[Any], Any]) -> None:
        self._changed = changed
        self._scheduled: dict[int, tuple[dict[str, Any], Any]] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._change) for optimizer in optimizers]

    def put_back(self) -> None:
        """The step is over: put the scheduled rates back."""
        for group, rate in self._scheduled.values():
            group["lr"] = rate
        self._scheduled.clear()

    def remove(self) -> None:
        """Change nothing any more."""
        self.put_back()
        for hook in self._hooks:
            hook.remove()

    def _change(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # An optimizer may be called several times in one step, for one group after the other.
        for group in optimizer.param_groups:
            if id(group) not in self._scheduled:
                self._scheduled[id(group)] = (group, group["lr"])
                group["lr"] = self._changed(group["lr"])
