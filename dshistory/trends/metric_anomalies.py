"""Anomalies of the metrics of every step: loss, gradient norm and learning rate, captured steps or not.

A metric is out of line where it rises above all of the eight values before it by more than five times the largest
change among them, of which six must be there: so a warm-up, whose steps are equal, is none, and noise hardly ever. Of
each metric the first such step counts, and the first at which it is not finite, as long as its update was applied: a
loss scale that was too large skips it.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from catalog.history import History
from catalog.lineage_metrics import lineage_metrics

__all__ = ["METRIC", "metric_anomalies"]

METRIC: Final = "metric"
"""The kind, in place of a tensor's, of an anomaly of a metric."""

_NAMES: Final = ("lr", "loss", "grad_norm")
_FACTOR: Final = 5.0
_PAST: Final = 8
_LEAST_PAST: Final = 6


def metric_anomalies(history: History, run: str) -> list[dict[str, Any]]:
    """Return the step, anomaly, kind, name, value and usual value of each, in the order of steps."""
    found = lineage_metrics(history.paths, run, [*_NAMES, "applied"])
    skipped = {step for step, applied in found.get("applied", {}).items() if applied == 0}
    rows = [row for name in _NAMES if name in found for row in _of_metric(name, found[name], skipped)]
    return sorted(rows, key=lambda row: row["step"])


def _of_metric(name: str, by_step: Mapping[int, float], skipped: set[int]) -> list[dict[str, Any]]:
    steps = [step for step in by_step if step not in skipped]
    values = np.array([by_step[step] for step in steps])
    rows = []
    broken = np.flatnonzero(~np.isfinite(values)).tolist()
    if broken:
        rows.append(_row(steps[broken[0]], "not finite", name, values[broken[0]], math.nan))
    for at in range(_LEAST_PAST, broken[0] if broken else len(values)):
        past = values[max(0, at - _PAST) : at]
        highest = float(past.max())
        if values[at] > highest + _FACTOR * float(np.abs(np.diff(past)).max()) and values[at] > highest * (1 + 1e-6):
            rows.append(_row(steps[at], "rises", name, values[at], highest))
            break
    return rows


def _row(step: int, anomaly: str, name: str, value: float, usual: float) -> dict[str, Any]:
    found = {"step": step, "anomaly": anomaly, "kind": METRIC, "name": name}
    return {**found, "value": float(value), "usual": None if math.isnan(usual) else usual}
