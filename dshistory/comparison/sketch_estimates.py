"""The diff of two checkpoints estimated from their sketches: no tensor is read.

A sketch S is linear, S(a) - S(b) = S(a - b), and the sum of its squares is an unbiased estimate of the tensor's: so the
figures of an update come out of `dshistory.metrics` as they do for the tensors themselves, with sums over buckets in
place of sums over elements. docs/sketches.md derives the estimators and their bounds.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from catalog.history import History
from catalog.records import CheckpointRef
from dshistory import metrics

__all__ = ["estimated", "norm_bound", "norms"]

_ROUNDING: Final = 6e-8
"""The error of a distance between sketches that are stored as float32, relative to the norms of the two tensors."""

_QUERY: Final = """
SELECT kind, name, sketch, sum_of_squares FROM sketches JOIN statistics USING (run, step, kind, name)
WHERE run = $run AND step = $step AND nan = 0 AND inf = 0
"""

Key = tuple[str, str]
_Sketch = npt.NDArray[np.float64]


def estimated(history: History, before: CheckpointRef, after: CheckpointRef) -> Mapping[Key, Mapping[str, Any]]:
    """Return the figures of a diff's row for each (kind, name) that has a sketch on both sides.

    Norms are exact; `update_norm` and the figures that follow from it are estimates, off by no more than the relative
    `bound` for about 95 of 100 tensors. Tensors that sketches cannot compare are left out: those with values that are
    not finite, and those whose update is smaller than the rounding of the sketches."""
    sides = [_sketches(history, ref) for ref in (before, after)]
    found = {}
    for key in sides[0].keys() & sides[1].keys():
        figures = _figures(*sides[0][key], *sides[1][key])
        if figures is not None:
            found[key] = figures
    return found


def norm_bound(buckets: int) -> float:
    """Return how far the true norm may be above an estimate from so many buckets, relatively, at about 95 %.

    The bound is 2.5 standard deviations of the squared norm, sqrt(2 / buckets) each; it is infinite for very short
    sketches."""
    deviation = 2.5 * math.sqrt(2 / buckets)
    return 1 / math.sqrt(1 - deviation) - 1 if deviation < 1 else math.inf


def norms(history: History, ref: CheckpointRef) -> Mapping[Key, Mapping[str, float]]:
    """Return the exact norm of each (kind, name) that has statistics, as norm_before and norm_after of a tensor that a
    diff finds unchanged."""
    sql = "SELECT kind, name, norm FROM statistics WHERE run = $run AND step = $step"
    rows = history.query(sql, {"run": ref.run, "step": ref.step}).to_pylist()
    return {(row["kind"], row["name"]): {"norm_before": row["norm"], "norm_after": row["norm"]} for row in rows}


def _sketches(history: History, ref: CheckpointRef) -> dict[Key, tuple[_Sketch, float]]:
    """Return the sketch and the sum of squares of each (kind, name) that has a sketch and is finite throughout."""
    table = history.query(_QUERY, {"run": ref.run, "step": ref.step})
    lengths = pc.list_value_length(table["sketch"]).to_numpy()
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values = pc.list_flatten(table["sketch"]).to_numpy().astype(np.float64)
    columns = (table[name].to_pylist() for name in ("kind", "name", "sum_of_squares"))
    return {
        (kind, name): (values[ends[i] : ends[i + 1]], squares)
        for i, (kind, name, squares) in enumerate(zip(*columns, strict=True))
    }


def _figures(
    sketch_before: _Sketch, before_squares: float, sketch_after: _Sketch, after_squares: float
) -> Mapping[str, Any] | None:
    if len(sketch_before) != len(sketch_after) or not math.isfinite(before_squares + after_squares):
        return None
    norm_before, norm_after = float(metrics.norm(before_squares)), float(metrics.norm(after_squares))
    update_squares = float(np.square(sketch_after - sketch_before).sum())
    update_norm = float(metrics.norm(update_squares))
    # Each bucket is rounded to float32 when it is stored: near that rounding the difference of two sketches says
    # nothing.
    if update_norm <= 10 * _ROUNDING * (norm_before + norm_after):
        return None
    # The lengths under the cosine are estimates as well: then the errors of the three largely cancel for similar
    # tensors.
    cosine = metrics.cosine(
        float(sketch_before @ sketch_after),
        float(np.square(sketch_before).sum()),
        float(np.square(sketch_after).sum()),
    )
    return {
        "relative_update": float(metrics.relative_update(update_squares, before_squares)),
        "update_norm": update_norm,
        "cosine": metrics.known(cosine),
        "norm_before": norm_before,
        "norm_after": norm_after,
        "nonfinite_before": 0,
        "nonfinite_after": 0,
        "bound": norm_bound(len(sketch_before)),
    }
