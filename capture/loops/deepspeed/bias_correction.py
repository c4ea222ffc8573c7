"""The products of betas by which DeepSpeed's CPU Adam corrects its bias, and the update from which they have come.

Its compiled code keeps beta^step as a running product of floats, with one factor for each update. For a step that is
not the one after the last, as after a load, and for other betas, it takes the power in its place, which differs in the
last bits, and goes on from that. So the products follow from the number of updates and from the last update that took
the power: its number is called `since` here, and is 0 where none did. They are stored nowhere, and can't be read: only
what an update makes of them tells which they are.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["TracedProducts", "repeat_products", "updates_of"]

_Rates = tuple[Any, ...]


def updates_of(inner: Any) -> int:
    """Return the number of updates in the state of an optimizer; the largest, where its tensors have several."""
    states = [state for state in inner.state.values() if isinstance(state, Mapping)]
    return max((int(state.get("step", 0)) for state in states), default=0)


def repeat_products(inner: Any, *, since: int = 0) -> None:
    """Bring the products of a DeepSpeedCPUAdam to where as many updates as its state has leave them, of which the one
    with the number `since`, perhaps the next one, is the last that took the power. Other optimizers have no products.
    It takes half a second for a million updates.
    """
    if hasattr(inner, "ds_opt_adam"):
        rates = list(map(_rates, inner.param_groups))
        _repeat(inner.ds_opt_adam, inner.opt_id, rates, since=since, updates=updates_of(inner))


class TracedProducts:
    """Follows the products of an optimizer from its update at hand on: a second state of the same compiled code is
    given the same steps and betas, and both make an update of the same few hundred elements after each. These are none
    of the training's, and an update of the step that was made last changes no product.
    """

    since: int | None = 0
    """The last update that took the power; None where what is made tells of other products than any here."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._code = optimizer.ds_opt_adam
        kind = type(optimizer)
        self._own, kind.optimizer_id = kind.optimizer_id, kind.optimizer_id + 1
        self._code.create_adam(self._own, *_rates(optimizer.param_groups[0])[:-1], optimizer.adam_w_mode, False)
        weakref.finalize(self, self._code.destroy_adam, self._own)
        random = torch.Generator().manual_seed(0)
        self._sample = [torch.rand(256, generator=random) for _ in range(4)]
        self._updates: int | None = None
        self._before = 0
        self._first = 0
        self._rates: list[_Rates] = []
        self._made: list[tuple[int, _Rates]] = []
        self._calls: list[tuple[int, _Rates]] = []

    def update_begins(self) -> None:
        """An update is about to begin, and the optimizer has all of its param groups."""
        rates = list(map(_rates, self._optimizer.param_groups))
        updates, moved = updates_of(self._optimizer), list(map(_betas, rates)) != list(map(_betas, self._rates))
        self._before, self._rates, self._made = updates, rates, []
        if updates != self._updates or moved:
            # Somebody has loaded another state, or set other betas; before the first update, nobody has seen it.
            self._first = updates + 1
            self._begin(0 if self._updates is None else self._first)
        self._updates = updates

    def call_begins(self) -> None:
        """One call of the optimizer is about to begin, perhaps with some of its param groups."""
        self._calls = [
            (int(self._optimizer.state.get(one, {}).get("step", 0)) + 1, _rates(group))
            for group in self._optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        ]

    def call_ended(self) -> None:
        """The call is over, and the products are those of its last step."""
        if not self._calls:
            return
        self._updates = self._before + 1
        if self.since is None:
            return
        if any(step != self._updates for step, _ in self._calls):
            self.since = None
            return
        self._follow(self._calls)
        if not self._made and not self._agree():
            for since in dict.fromkeys((self._updates, self._first, 0)):
                self._begin(since)
                self._follow(self._calls)
                if self._agree():
                    break
        self._made += self._calls
        if not self._agree():
            self.since = None

    def _begin(self, since: int) -> None:
        self.since = since
        _repeat(self._code, self._own, self._rates, since=since, updates=self._before)

    def _follow(self, calls: Sequence[tuple[int, _Rates]]) -> None:
        for step, rates in calls:
            _update(self._code, self._own, step, rates)

    def _agree(self) -> bool:
        """Return whether the optimizer and the state here make the same of the sample."""
        step, (rate, *others, _) = self._calls[-1]
        # A rate of zero would hide the products.
        rates = (rate or 1.0, *others, True)
        made = []
        for number in (self._optimizer.opt_id, self._own):
            tensors = [one.clone() for one in self._sample]
            self._code.adam_update(number, step, *rates, *tensors)
            made.append(tensors[0].view(torch.int32))
        return torch.equal(*made)


def _repeat(code: Any, number: int, rates: Sequence[_Rates], *, since: int, updates: int) -> None:
    """Call the compiled code as many updates have called it, of which number `since` took the power."""
    if since:
        # Behind this step neither the next update nor that of the same step is what `since` is.
        _update(code, number, since + 1, rates[0])
    for step in range(max(1, since), updates + 1):
        for one in rates:
            _update(code, number, step, one)


def _update(code: Any, number: int, step: int, rates: _Rates) -> None:
    nothing = torch.zeros(0)
    code.adam_update(number, step, *rates, nothing, nothing, nothing, nothing)


def _rates(group: Mapping[str, Any]) -> _Rates:
    return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])


def _betas(rates: _Rates) -> _Rates:
    return rates[1:3]
