"""Averages of checkpoints, points on the line between two, and the differences between two.

- The average: sum of w_i x_i, with the weights divided by their sum; all equal by default.
- The exponential moving average after the fact, of n checkpoints, the newest last: the weights are
  ema^(n - i) / (ema^(n - 1) + ... + ema + 1). This is Adam's bias-corrected moving average over the checkpoints (and
  not over the steps between them): a plain recursion would give the first checkpoint the weight ema^(n - 1), which for
  ten checkpoints and 0.999 is nearly all of it.
- The point t between a and b: (1 - t) a + t b, also outside of 0 to 1.
- The task vector from a to b: b - a.
"""

import math
from collections.abc import Sequence

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.formats import counted
from dshistory.hindsight.combination import Term, combine
from dshistory.hindsight.computed_state import ComputedState
from dshistory.patterns import Patterns

__all__ = ["average", "difference", "point_between"]


def average(
    history: History,
    refs: Sequence[CheckpointRef],
    *,
    weights: Sequence[float] | None,
    ema: float | None,
    kinds: Patterns,
    names: Patterns,
    quiet: bool,
) -> ComputedState:
    """See `Explorer.average`."""
    terms = [Term(ref, weight) for ref, weight in zip(refs, _shares(refs, weights, ema), strict=True)]
    found = combine(history, terms, of="values", kinds=kinds, names=names, verb="average", quiet=quiet)
    how = "average" if weights is None and ema is None else "weighted average" if ema is None else f"ema {ema:g}"
    which = (
        ", ".join(map(str, refs)) if len(refs) <= 3 else f"{counted(len(refs), 'checkpoint')}, {refs[0]} to {refs[-1]}"
    )
    return ComputedState(f"{how} of {which}", found, root=history.root)


def point_between(
    history: History, a: CheckpointRef, b: CheckpointRef, t: float, *, kinds: Patterns, names: Patterns, quiet: bool
) -> ComputedState:
    """See `Explorer.interpolate`."""
    if not math.isfinite(t):
        raise SetupError(f"interpolate: t={t}: give a finite number: 0 is {a}, 1 is {b}")
    terms = [Term(a, 1.0 - t), Term(b, float(t))]
    found = combine(history, terms, of="values", kinds=kinds, names=names, verb="interpolate", quiet=quiet)
    return ComputedState(f"{t:g} of the way from {a} to {b}", found, root=history.root)


def difference(
    history: History, a: CheckpointRef, b: CheckpointRef, *, kinds: Patterns, names: Patterns, quiet: bool
) -> ComputedState:
    """See `Explorer.delta`."""
    terms = [Term(a, -1.0), Term(b, 1.0)]
    found = combine(history, terms, of="differences", kinds=kinds, names=names, verb="delta", quiet=quiet)
    return ComputedState(f"difference {b} - {a}", found, root=history.root)


def _shares(refs: Sequence[CheckpointRef], weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """Return the weight of each checkpoint; together they are 1."""
    if weights is not None and ema is not None:
        raise SetupError("average: pass weights= or ema=, not both: each says how much a checkpoint counts")
    given = [1.0] * len(refs)
    if ema is not None:
        if not 0 < ema < 1:
            raise SetupError(f"average: ema={ema}: give a number between 0 and 1, as 0.999")
        given = [ema ** (len(refs) - place) for place in range(1, len(refs) + 1)]
    if weights is not None:
        given = [float(weight) for weight in weights]
    if len(given) != len(refs):
        raise SetupError(f"average: {len(given)} weights for {counted(len(refs), 'checkpoint')}: give one for each")
    total = math.fsum(given)
    if not all(map(math.isfinite, given)) or total == 0:
        raise SetupError(f"average: weights={given}: give finite numbers whose sum, {total:g}, is not 0")
    return [weight / total for weight in given]
