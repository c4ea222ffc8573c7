"""Other learning rates for the updates of a replay, whatever sets the scheduled ones: a scheduler, an engine, or the
training script itself.

While an update runs the rate of every group is the changed one; behind it the scheduled one is there again, because
many schedulers compute their next rate from the one that stands in the group. An engine may move its scheduler before
its step is over, so the hooks are those of the optimizer itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.loops.module_hooks import uncompiled

__all__ = ["ChangedRates"]


class ChangedRates:
    """Changes the rates of every update of these optimizers, until `remove` is called.

    `last` is the rate of the first group in the last update.

    changed: returns the rate of an update for the scheduled one, a number, or a tensor where the optimizer keeps one
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], changed: Callable[[Any], Any]) -> None:
        self._changed = changed
        self._scheduled: list[tuple[dict[str, Any], Any]] = []
        self.last: Any = None
        self._hooks = [optimizer.register_step_pre_hook(uncompiled(self._change)) for optimizer in optimizers]
        self._hooks += [optimizer.register_step_post_hook(uncompiled(self._put_back)) for optimizer in optimizers]

    def remove(self) -> None:
        """Change nothing any more."""
        self._put_back()
        for hook in self._hooks:
            hook.remove()

    def _change(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # An update that raised has left changed rates behind.
        self._put_back()
        for group in optimizer.param_groups:
            self._scheduled.append((group, group["lr"]))
            group["lr"] = self._changed(group["lr"])
        self.last = optimizer.param_groups[0]["lr"]

    def _put_back(self, *_: Any) -> None:
        for group, rate in self._scheduled:
            group["lr"] = rate
        self._scheduled.clear()
