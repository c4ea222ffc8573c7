"""Anomalies that belong to one event, as one row: what stands nearest to its cause leads it, the others are counted.

Everything that is first seen from the step of an event's first anomaly up to the second checkpoint from there on is
part of it: one bad step shows in its own loss, in the next checkpoint, and often only in the one after that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from dshistory.display.formats import counted
from dshistory.trends.metric_anomalies import METRIC

__all__ = ["event_rows", "numbered"]

_LOCAL: Final = 0.1
"""An anomaly of at most this share of all tensors at a step is local: rather a cause than what all tensors feel."""


def numbered(rows: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows, which ascend by step, with the number of their event; `steps` are those of the checkpoints."""
    found: list[dict[str, Any]] = []
    event, last = 0, -1
    for row in rows:
        if not event or row["step"] > last:
            event += 1
            place = int(np.searchsorted(steps, row["step"]))
            last = steps[min(place + 1, len(steps) - 1)] if place < len(steps) else row["step"]
        found.append({"event": event, **row})
    return found


def event_rows(rows: Sequence[Mapping[str, Any]], tensors: int) -> list[dict[str, Any]]:
    """Return a row for each event of numbered rows; `tensors` is how many there are."""
    events: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        events.setdefault(row["event"], []).append(row)
    return [_event(found, tensors) for found in events.values()]


def _event(rows: Sequence[Mapping[str, Any]], tensors: int) -> dict[str, Any]:
    sizes = Counter((row["anomaly"], row["step"]) for row in rows if row["kind"] != METRIC)

    def nearness(place: int) -> tuple[int, int]:
        row = rows[place]
        if row["kind"] == METRIC:
            return (0 if row["name"] == "lr" else 3), place
        if row["anomaly"] == "not finite":
            return 1, place
        return (2 if sizes[row["anomaly"], row["step"]] <= max(1, _LOCAL * tensors) else 4), place

    order = [rows[place] for place in sorted(range(len(rows)), key=nearness)]
    return {**order[0], "also": _also(order[1:]) or None}


def _also(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the other anomalies of an event in words: metrics by name, tensors as counts, with their first step."""
    words = [f"{row['name']} {row['anomaly']} ({row['step']})" for row in rows if row["kind"] == METRIC]
    of_tensors: dict[str, list[int]] = {}
    for row in rows:
        if row["kind"] != METRIC:
            of_tensors.setdefault(row["anomaly"], []).append(row["step"])
    words += [f"{anomaly}: {counted(len(at), 'tensor')} ({min(at)})" for anomaly, at in of_tensors.items()]
    return ", ".join(words)
