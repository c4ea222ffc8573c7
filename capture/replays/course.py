"""The course of a replay inside a session: what is changed at its beginning, at each step, and where it ends."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from capture.loops.interface import Loop
from capture.replays.batches import BatchesOfSteps, leave_out
from capture.replays.change import Change
from capture.replays.rates import ChangedRates
from capture.replays.request import ReplayRequest
from catalog.errors import SetupError

__all__ = ["ReplayCourse", "ReplayEnded"]

_BEGIN_AT_ZERO = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
"""Parts of an optimizer's state that are zeros before the first update."""


class ReplayEnded(SystemExit):
    """The last step of a replay is over, and captured: the script that trains ends here, as one that is done."""

    def __init__(self) -> None:
        super().__init__(0)


class ReplayCourse:
    """Changes a training as `request` asks, from the step to which it was put back, on every rank.

    It is told of updates and steps by the session (`capture.session.step_events.Observer`). Making one changes the
    training: SetupError, by name, for a change that does not apply to it.
    """

    def __init__(self, request: ReplayRequest, loop: Loop, dataloader: Any, *, rank: int) -> None:
        self.request = request
        self._rates: ChangedRates | None = None
        self._take_all: Callable[[], None] = lambda: None
        _change_groups(loop.optimizers(), request.change)
        if request.change.reset_optimizer:
            _reset(loop)
        if request.change.seed is not None:
            _seed(request.change.seed + rank)
        if request.change.skip_batches and request.leaves_out:
            self._take_all = _skip(request, dataloader)
        if request.change.function is not None:
            request.change.function(loop.subjects()[0], loop.optimizers()[-1])
        if request.change.lr is not None or request.change.lr_scale is not None:
            self._rates = ChangedRates(loop.optimizers(), _rate(request.change))

    def update_begins(self, step: int) -> None:
        """An update beyond `step` is about to begin. Raises ReplayEnded where the replay is over."""
        if step >= self.request.until:
            self.end()
            raise ReplayEnded

    def step_ended(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """The step is over; return its metrics, with the learning rate that the update had."""
        if self.request.on_step is not None:
            self.request.on_step(step, metrics.keys())
        if self._rates is None or self._rates.last is None:
            return metrics
        rate = self._rates.last
        return {**metrics, "lr": rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)}

    def end(self) -> None:
        """Let go of the training: later updates are as scheduled, and take every batch."""
        self._take_all()
        if self._rates is not None:
            self._rates.remove()


def _rate(change: Change) -> Any:
    def changed(scheduled: Any) -> Any:
        if change.lr is not None:
            rate = torch.full_like(scheduled, change.lr) if isinstance(scheduled, torch.Tensor) else change.lr
        else:
            rate = scheduled
        return rate if change.lr_scale is None else rate * change.lr_scale

    return changed


def _change_groups(optimizers: Sequence[torch.optim.Optimizer], change: Change) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for name in ("betas", "momentum", "weight_decay"):
        value = getattr(change, name)
        having = [group for group in groups if name in group]
        if value is not None and not having:
            raise SetupError(
                f"change: {name}={value!r}: {', '.join(type(one).__qualname__ for one in optimizers)} has no {name} in "
                "any parameter group"
            )
        if value is not None:
            for group in having:
                group[name] = value


def _reset(loop: Loop) -> None:
    """Let the optimizers' state be what it is before the first update, in place: engines keep references to it."""
    for optimizer in loop.optimizers():
        state: dict[Any, dict[str, Any]] = optimizer.state
        other = sorted({str(name) for one in state.values() for name in one} - _BEGIN_AT_ZERO)
        if other:
            raise SetupError(
                f"change: reset_optimizer: {type(optimizer).__qualname__} keeps {', '.join(other)}, whose first value "
                "is not known: make a new optimizer in a change that is a function"
            )
        for one in state.values():
            for name, value in one.items():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif value is not None:
                    one[name] = 0


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _skip(request: ReplayRequest, dataloader: Any) -> Callable[[], None]:
    if dataloader is None:
        raise SetupError(
            f"change: skip_batches={list(request.change.skip_batches)}: the training has not given its data loader: "
            "capture.enable(..., dataloader=loader)"
        )
    counted = BatchesOfSteps(
        after_step=request.ref.step,
        batches_per_step=request.batches_per_step,
        left_out=frozenset(request.change.skip_batches),
    )
    return leave_out(dataloader, counted.wanted)
