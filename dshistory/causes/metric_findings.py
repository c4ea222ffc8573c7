"""The findings in the metrics of every step and in the checkpoints' groups: learning rates, decay, what is not finite.

A schedule moves smoothly, so a learning rate is out of line where it rises above all rates before it by more than five
times the largest of the eight changes before; a warm-up is a rise too, of equal steps. A fall is a schedule's, unless
the rate is back at the next step.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from dshistory.causes.findings import Finding
from dshistory.causes.record import Record, Series

__all__ = ["learning_rate_findings", "loss_not_finite", "rule_findings"]

_CHANGES: Final = 8
_FACTOR: Final = 5.0
_DIP: Final = 0.1


def learning_rate_findings(record: Record) -> Iterator[Finding]:
    """Yield the first step at which the logged learning rate is out of line, if there is one."""
    series = record.metrics.get("lr")
    if series is None:
        return
    rates = series.values
    for at in range(3, len(rates)):
        changes = np.abs(np.diff(rates[max(0, at - _CHANGES - 1) : at]))
        usual, highest = float(changes.max()), float(rates[:at].max())
        step = int(series.steps[at])
        if highest > 0 and rates[at] > highest * (1 + 1e-6) and rates[at] - rates[at - 1] > _FACTOR * usual:
            lasted = int(np.argmax(rates[at:] <= highest)) if (rates[at:] <= highest).any() else len(rates) - at
            evidence = (
                f"the learning rate of step {step} is {rates[at]:.4g}, {rates[at] / rates[at - 1]:.4g} times that of "
                f"the step before, for {lasted} step{'' if lasted == 1 else 's'}; the highest before was {highest:.4g}"
            )
        elif at + 1 < len(rates) and _fell(rates[at], min(rates[at - 1], rates[at + 1]), highest):
            evidence = (
                f"the learning rate of step {step} is {rates[at]:.4g}; it was {rates[at - 1]:.4g} at the step before, "
                f"and is {rates[at + 1]:.4g} at the one after"
            )
        else:
            continue
        call = (
            f"h.sql(\"SELECT step, value FROM metrics WHERE name = 'lr' AND step BETWEEN {step - 3} AND {step + 3} "
            'ORDER BY step")'
        )
        yield Finding("learning rate", step - 1, step, (), evidence, call)
        return


def _fell(rate: float, beside: float, highest: float) -> bool:
    """Return whether a rate is far below those of the steps before and after it, unlike the last one before a warm
    restart."""
    return rate < beside / 2 and beside - rate > _DIP * highest


def rule_findings(record: Record) -> Iterator[Finding]:
    """Yield each change of a group's hyperparameters, other than a schedule of all groups' learning rates."""
    for place in record.rule_changes:
        before, after = record.rules(place - 1), record.rules(place)
        since, step = record.refs[place - 1].step, record.refs[place].step
        both = [name for name in after if name in before]
        call = f"h.audit({since}, {step})"
        for field in ("weight_decay", "betas", "eps", "momentum"):
            names = [name for name in both if getattr(before[name], field) != getattr(after[name], field)]
            if names:
                old, new = (getattr(rules[names[0]], field) for rules in (before, after))
                word = field.replace("_", " ")
                yield Finding(word, since, step, names, f"{word} of the group: {old} before, {new} after", call)
        ratios = {name: after[name].lr / before[name].lr if before[name].lr else math.nan for name in both}
        known = sorted({round(ratio, 6) for ratio in ratios.values() if math.isfinite(ratio)})
        if len(known) > 1:
            least = min(known, key=lambda ratio: abs(math.log(ratio)) if ratio > 0 else math.inf)
            names = [name for name in both if round(ratios[name], 6) != least]
            old, new = (rules[names[0]].lr for rules in (before, after))
            yield Finding(
                "learning rate of a group",
                since,
                step,
                names,
                f"learning rate of the group: {old:.4g} before, {new:.4g} after; that of the others went x{least:.4g}",
                call,
            )


def loss_not_finite(record: Record) -> Iterator[Finding]:
    """Yield the first step whose loss is not finite."""
    series = record.metrics.get("loss", Series(np.zeros(0, np.int64), np.zeros(0)))
    broken = np.flatnonzero(~np.isfinite(series.values))
    if len(broken):
        step = int(series.steps[broken[0]])
        evidence = f"the loss of step {step} is {series.values[broken[0]]:g}, that of every step before is finite"
        # Either the batch of this step made it, or the update before had broken the weights.
        yield Finding("not finite", step - 2, step, (), evidence, f'h.bisect("loss > 1e30", bad={step})')
