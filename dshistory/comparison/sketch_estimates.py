"""The diff of two checkpoints from their sketches, nothing read: docs/sketches.md has the estimators and their bounds."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from catalog.history import History
from catalog.records import CheckpointRef

__all__ = ["estimated", "norm_bound", "norms"]

_ROUNDING: Final = 6e-8
"""Of a sketch stored as float32, relative to the norms of the two tensors."""

_QUERY: Final = """
SELECT kind, name, sketch, norm FROM sketches JOIN statistics USING (run, step, kind, name)
WHERE run = $run AND step = $step AND nan = 0 AND inf = 0
"""

Key = tuple[str, str]
_Sketch = npt.NDArray[np.float64]


def estimated(history: History, before: CheckpointRef, after: CheckpointRef) -> Mapping[Key, Mapping[str, Any]]:
    """The numbers of a diff's row for each (kind, name) that has a sketch on both sides. Norms are exact; `update_norm` and
    what follows from it are estimates, off by no more than the relative `bound` for about 95 of 100 tensors.

    Left out is what sketches can't tell: tensors with values that are not finite, and updates that drown in rounding.
    """
    sides = [_sketches(history, ref) for ref in (before, after)]
    found = {}
    for key in sides[0].keys() & sides[1].keys():
        numbers = _numbers(*sides[0][key], *sides[1][key])
        if numbers is not None:
            found[key] = numbers
    return found


def norm_bound(buckets: int) -> float:
    """How far the true norm may be above an estimate, relatively, at about 95 %; infinite for very short sketches."""
    deviation = 2.5 * math.sqrt(2 / buckets)
    return 1 / math.sqrt(1 - deviation) - 1 if deviation < 1 else math.inf


def norms(history: History, ref: CheckpointRef) -> Mapping[Key, Mapping[str, float]]:
    """The exact norm of each (kind, name) that has statistics, as that before and after a diff that finds it unchanged."""
    sql = "SELECT kind, name, norm FROM statistics WHERE run = $run AND step = $step"
    rows = history.query(sql, {"run": ref.run, "step": ref.step}).to_pylist()
    return {(row["kind"], row["name"]): {"norm_before": row["norm"], "norm_after": row["norm"]} for row in rows}


def _sketches(history: History, ref: CheckpointRef) -> dict[Key, tuple[_Sketch, float]]:
    table = history.query(_QUERY, {"run": ref.run, "step": ref.step})
    lengths = pc.list_value_length(table["sketch"]).to_numpy()
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values = pc.list_flatten(table["sketch"]).to_numpy().astype(np.float64)
    columns = (table[name].to_pylist() for name in ("kind", "name", "norm"))
    return {
        (kind, name): (values[ends[i] : ends[i + 1]], norm)
        for i, (kind, name, norm) in enumerate(zip(*columns, strict=True))
    }


def _numbers(sketch_before: _Sketch, norm_before: float, sketch_after: _Sketch, norm_after: float) -> Any:
    if len(sketch_before) != len(sketch_after) or not math.isfinite(norm_before + norm_after):
        return None
    squares = float(np.square(sketch_after - sketch_before).sum())
    update_norm = math.sqrt(squares)
    if update_norm <= 10 * _ROUNDING * (norm_before + norm_after):
        return None
    lengths = math.sqrt(float(np.square(sketch_before).sum()) * float(np.square(sketch_after).sum()))
    cosine = float(sketch_before @ sketch_after) / lengths if lengths else None
    return {
        "relative_update": update_norm / norm_before if norm_before else math.inf,
        "update_norm": update_norm,
        "cosine": None if cosine is None else max(-1.0, min(1.0, cosine)),
        "norm_before": norm_before,
        "norm_after": norm_after,
        "nonfinite_before": 0,
        "nonfinite_after": 0,
        "bound": norm_bound(len(sketch_before)),
    }
