"""The order of a diff: each row measured against what such tensors do between the same two checkpoints.

`dshistory.metrics` defines the figure. Here it is decided which tensors are peers: those of the same kind that have the
same name in another layer, numbers in it aside, and as many dimensions. Whole numbers (counters, indices) are compared
among themselves only.
"""

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from dshistory import metrics
from dshistory.comparison.grouping import column

__all__ = ["MEANING", "sorted_rows"]

MEANING: Final = "times_usual: how many times as far as such tensors moved, the most unusual first"
"""The note of a diff says this about its order."""

_DIGITS: Final = re.compile(r"[0-9]+")

Row = Mapping[str, Any]
Key = tuple[str, str]


def sorted_rows(rows: Sequence[Row], *, whole_numbers: Collection[Key] = ()) -> list[Row]:
    """Return the rows with their figure `times_usual`, null where it is unknown, the largest first; rows that gained or
    lost values that are not finite stand above the others.

    `whole_numbers`: the (kind, name) of the tensors whose dtype is one of integers."""
    ranked: list[Row] = []
    of_kind: dict[Hashable, list[Row]] = {}
    for row in rows:
        of_kind.setdefault((row["kind"], (row["kind"], row["name"]) in whole_numbers), []).append(row)
    for alike in of_kind.values():
        figures = _times_usual(alike)
        ranked += [{**row, "times_usual": metrics.known(figure)} for row, figure in zip(alike, figures, strict=True)]
    return sorted(ranked, key=_most_unusual_first)


def _times_usual(rows: Sequence[Row]) -> metrics.Floats:
    update, before, after = (column(rows, key) for key in ("update_norm", "norm_before", "norm_after"))
    numel = np.array([prod(row["shape"]) for row in rows], np.float64)
    # Moments are zero at the beginning of a training: the other side tells how large they are.
    size = np.fmax(before, after) / metrics.norm(np.maximum(numel, 1.0))
    typical = metrics.typical_size(size, numel)
    # A tensor that is equal on both sides has no norm here, and moved by nothing.
    moved = metrics.movement(update**2, np.nan_to_num(before, nan=0.0) ** 2, numel, typical)
    return metrics.times_usual(moved, [(_DIGITS.sub("*", row["name"]), len(row["shape"])) for row in rows])


def _most_unusual_first(row: Row) -> tuple[bool, float, float, str, str]:
    nonfinite = row.get("nonfinite_before") != row.get("nonfinite_after")
    unusual, update = (1.0 if row.get(key) is None else -row[key] for key in ("times_usual", "relative_update"))
    return not nonfinite, unusual, update, row["name"], row["kind"]
