"""Anomalies of a run: for each kind of anomaly and each tensor, the first step at which it is seen, joined into events.

All of it comes from the metrics (`metric_anomalies`), statistics and sketches in the catalog; no tensor is read. A
tensor is measured against its own past: a value is out of line when it is five times larger than in any of the eight
analyzed checkpoints before, at least six of which must have the tensor: with three, the end of a warm-up or a bias that
was born at zero looks like a jump in two of five healthy trainings. The factor is relative so that one rule fits biases
and embeddings alike, and the maximum, not the mean, of the past keeps a tensor that always jitters quiet. A tensor that
is smaller than typical ones of its kind counts as a typical one (`dshistory.metrics.movement`), so that noise in a bias
that is nearly zero, or that no softmax feels, is none.

A change grows with the number of steps it takes. So where the gap to the checkpoint before is longer than any gap in
the past, the limit is raised by the ratio of the two.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.comparison.sketch_estimates import estimated
from dshistory.display.formats import counted
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.metrics import Floats, movement, rms, typical_movement, typical_size, usual_movement
from dshistory.trends.anomaly_events import event_rows, numbered
from dshistory.trends.metric_anomalies import metric_anomalies
from dshistory.trends.statistics_cache import CachedStatistics, cached_statistics
from dshistory.trends.statistics_matrix import Key

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["AnomalyTable", "anomalies"]

_DETAILS: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("anomaly", pa.string()),
        ("kind", pa.string()),
        ("name", pa.string()),
        ("value", pa.float64()),
        ("usual", pa.float64()),
        ("event", pa.int64()),
    ]
)
_SCHEMA: Final = pa.schema([*_DETAILS, ("also", pa.string())])
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("run", "event"))
_PARTS: Final = ("squares", "numel", "nonfinite", "zeros_share", "update_squares", "largest")
_WEIGHTS: Final = ("model", "master")
_SECOND_MOMENTS: Final = ("exp_avg_sq",)
_LEAST_PAST: Final = 6
"""A value is compared with the past only where the past has at least so many checkpoints."""

Mask = npt.NDArray[np.bool_]
Parts = Mapping[str, npt.NDArray[Any]]
"""The matrix (tensors, analyzed checkpoints) of each part, and more: `past`, how many of the eight checkpoints before
have the tensor, and `longer`, see `_longer`; for weights and buffers their movement, `moved`, and for the tensor's kind
the size of a typical element and the typical movement, `typical` and `lively` (see `dshistory.metrics`)."""

Finding = tuple[Mask, Floats, Floats]
"""Matrices of where an anomaly is seen, the value there, and the usual value before."""


class AnomalyTable(Table):
    """A row for each event, in the order of steps: the anomaly that is nearest to its cause, and in words what else was
    seen then. A learning rate leads, then what is not finite, what is local, the loss and the gradient norm, and last
    what most tensors feel."""

    details: Table
    """A row for each kind of anomaly and tensor or metric, at the first step where it is seen, in the order of steps;
    of one step what is not finite first, then the largest multiple of what was usual."""

    def event(self, number: int) -> Table:
        """Return the rows of one event in `details`. NotFoundError when there is no such event."""
        rows = self.details.to_arrow()
        found = rows.filter(pc.equal(rows["event"], number))
        if not found.num_rows:
            last = pc.max(rows["event"]).as_py() or 0
            raise NotFoundError(f"event {number!r}: there are {last}; the column `event` has their numbers")
        return Table(found, layout=_LAYOUT)

    def plot(self, *, top: int = 30) -> "go.Figure":
        """Draw a mark for each row of `details`, tensor by step, for the first `top` tensors. Needs the [notebook]
        extra."""
        from dshistory.display import plot

        return plot.anomaly_marks(self.details, top=top)


def anomalies(history: History, *, run: str | None) -> AnomalyTable:
    """See `Explorer.anomalies`."""
    refs = committed_lineage(history.paths, run)
    known = cached_statistics(
        history, refs, lambda keys: _PARTS if any(kind in _SECOND_MOMENTS for kind, _ in keys) else _PARTS[:-1]
    )
    rows = _rows(known.refs, known.keys, _with_past(history, known)) if known.refs else []
    rows = [*_of_metrics(history, refs), *rows]
    details = numbered(sorted(rows, key=lambda row: row["step"]), [ref.step for ref in refs])
    events = event_rows(details, len(known.keys))
    note = _note(len(events), len(details), len(known.refs), len(refs))
    note += _measures({row["anomaly"] for row in details})
    table = AnomalyTable(pa.Table.from_pylist(events, schema=_SCHEMA), note=note, layout=_LAYOUT)
    table.details = Table(pa.Table.from_pylist(details, schema=_DETAILS), note=note, layout=_LAYOUT)
    return table


def _of_metrics(history: History, refs: Sequence[CheckpointRef]) -> list[Mapping[str, Any]]:
    """Return the anomalies of the metrics, each with the run whose next checkpoint has its step in it."""
    if not refs:
        return []
    steps = [ref.step for ref in refs]
    return [
        {"run": refs[min(int(np.searchsorted(steps, row["step"])), len(refs) - 1)].run, **row}
        for row in metric_anomalies(history, refs[-1].run)
    ]


def _with_past(history: History, known: CachedStatistics) -> Parts:
    """Return the parts with the matrices that follow from them; see `Parts`."""
    updates, squares, numel = _with_forks(history, known), known.parts["squares"], known.parts["numel"]
    typical, moved, lively = (np.zeros(known.known.shape, order="F") for _ in range(3))
    for kind in (*_WEIGHTS, "buffer"):
        rows = np.flatnonzero([one == kind for one, _ in known.keys])
        if len(rows):
            typical[rows] = typical_size(rms(squares[rows], numel[rows]), numel[rows])
            moved[rows] = movement(updates[rows], _before(squares[rows]), numel[rows], _before(typical[rows]))
            lively[rows] = typical_movement(moved[rows])
    return {
        **known.parts,
        "past": _counts_before(known.known),
        "longer": np.broadcast_to(_longer([ref.step for ref in known.refs]), known.known.shape),
        "typical": typical,
        "moved": moved,
        "lively": lively,
    }


def _note(events: int, found: int, analyzed: int, checkpoints: int) -> str:
    """Say which checkpoints were examined: no anomaly in checkpoints without statistics means nothing."""
    anomalies = f"{counted(events, 'event')} of " if events else ""
    anomalies += f"{found} anomal{'y' if found == 1 else 'ies'}"
    if analyzed == 0:
        return f"unknown: {_of(analyzed, checkpoints)} has statistics, `analyze` computes them"
    few = "" if analyzed > _LEAST_PAST else f"; too few for jumps, which need {_LEAST_PAST} before them"
    if analyzed == checkpoints:
        return f"{anomalies} in {counted(checkpoints, 'checkpoint')}{few}"
    return f"{anomalies} in the {_of(analyzed, checkpoints)} that have statistics, `analyze` computes the others{few}"


def _measures(seen: Collection[str]) -> str:
    """Say what the column `value` is for the anomalies that are in the table."""
    return "".join(f"; {anomaly}: value is {what}" for anomaly, (what, _, _) in _CHECKS.items() if anomaly in seen)


def _of(analyzed: int, checkpoints: int) -> str:
    return f"{analyzed or 'none'} of {counted(checkpoints, 'checkpoint')}"


def _rows(refs: Sequence[CheckpointRef], keys: Sequence[Key], parts: Parts) -> list[Mapping[str, Any]]:
    """Build a row for each kind of anomaly and tensor, at the first checkpoint where it is seen."""
    found = []
    for anomaly, (_, kinds, check) in _CHECKS.items():
        chosen = [tensor for tensor, (kind, _) in enumerate(keys) if kinds is None or kind in kinds]
        if not chosen:
            continue
        of_chosen = parts if len(chosen) == len(keys) else {name: part[chosen] for name, part in parts.items()}
        with np.errstate(all="ignore"):
            seen, value, usual = check(of_chosen)
        for row in np.flatnonzero(seen.any(axis=1)).tolist():
            place = int(seen[row].argmax())
            found.append((place, anomaly, keys[chosen[row]], float(value[row, place]), float(usual[row, place])))
    found.sort(key=lambda each: (each[0], each[1] != "not finite", -_times_usual(each[1], *each[3:]), *each[1:3]))
    return [
        {
            "run": refs[place].run,
            "step": refs[place].step,
            "anomaly": anomaly,
            "kind": kind,
            "name": name,
            "value": value,
            "usual": usual,
        }
        for place, anomaly, (kind, name), value, usual in found
    ]


def _times_usual(anomaly: str, value: float, usual: float) -> float:
    """Return how many times the usual value a value is; of factors, how many times as far from 1."""
    if anomaly == "norm jumps":
        value, usual = math.log(value), math.log(usual)
    return value / usual if usual > 0 else math.inf


def _not_finite(parts: Parts) -> Finding:
    count = parts["nonfinite"]
    return (count > 0) & ~(_before(count) > 0), count, np.zeros_like(count)


def _norm_jumps(parts: Parts) -> Finding:
    usable = (parts["squares"] > 0) & (parts["nonfinite"] == 0)
    # In logarithms a factor up and a factor down are equally far, and half the logarithm of the squares is that of the
    # norm. That of a tensor that is smaller than typical ones on both sides weighs less, by how much smaller it is.
    squares = np.where(usable, parts["squares"], np.nan)
    logarithms = np.log(squares) / 2
    larger = np.fmax(squares, _before(squares)) / (_before(parts["typical"]) ** 2 * parts["numel"])
    apart = np.abs(logarithms - _before(logarithms))
    jump = apart * np.sqrt(np.fmin(1.0, larger))
    usual = _most_before(apart)
    return (
        (jump > 0.01) & (jump > 5 * usual * parts["longer"]) & (parts["past"] >= _LEAST_PAST),
        np.exp(jump),
        np.exp(usual),
    )


def _large_update(parts: Parts) -> Finding:
    moved = np.where(np.isinf(parts["moved"]), np.nan, parts["moved"])
    usual = usual_movement(_most_before(moved), _most_before(parts["lively"]))
    return (moved > 5 * usual * parts["longer"]) & (parts["past"] >= _LEAST_PAST), moved, usual


def _second_moment_explodes(parts: Parts) -> Finding:
    largest = parts["largest"]
    usual = _most_before(largest)
    return (largest > 100 * usual * parts["longer"]) & (usual > 0) & (parts["past"] >= _LEAST_PAST), largest, usual


def _goes_to_zero(parts: Parts) -> Finding:
    share = parts["zeros_share"]
    before = _before(share)
    return (share >= 0.5) & (before < 0.5), share, before


_CHECKS: Final[Mapping[str, tuple[str, Collection[str] | None, Callable[[Parts], Finding]]]] = {
    "not finite": ("a count of elements", None, _not_finite),
    "norm jumps": (
        "the factor between two norms, less for a tensor that is smaller than typical ones",
        (*_WEIGHTS, "buffer"),
        _norm_jumps,
    ),
    "large update": ("the norm of the update over that of the tensor, at least a typical one", _WEIGHTS, _large_update),
    "second moment explodes": ("the largest element", _SECOND_MOMENTS, _second_moment_explodes),
    "goes to zero": ("the share of zeros", _WEIGHTS, _goes_to_zero),
}
"""Kind of anomaly -> what its value is, the kinds of tensors that are checked for it (None: all), and the check."""


def _before(values: Floats, by: int = 1) -> Floats:
    """Return the values of so many checkpoints before; NaN where there is none."""
    shifted = np.full_like(values, np.nan)
    shifted[:, by:] = values[:, :-by]
    return shifted


def _most_before(values: Floats) -> Floats:
    """Return the largest known value of the eight checkpoints before.

    The window doubles: each pass joins it with itself, shifted, so three passes give 2, 4 and 8 checkpoints."""
    most = _before(values)
    for by in (1, 2, 4):
        most = np.fmax(most, _before(most, by))
    return most


def _counts_before(known: Mask) -> npt.NDArray[np.int8]:
    """Return how many of the eight checkpoints before each cell are known."""
    counts = np.zeros(known.shape, np.int8, order="F")
    for by in range(1, 9):
        counts[:, by:] += known[:, :-by]
    return counts


def _longer(steps: Sequence[int]) -> Floats:
    """Return how many times longer the gap to the checkpoint before is than any of the eight gaps before it; at least
    1."""
    gaps = np.diff(np.array(steps, np.float64), prepend=np.nan)[np.newaxis]
    return np.fmax(1.0, gaps / _most_before(gaps))


def _with_forks(history: History, known: CachedStatistics) -> Floats:
    """Return the squares of the updates, with those across forks added.

    The catalog computes updates within a run only; for the first checkpoint after a fork the sketches of both sides
    give it."""
    updates, refs = known.parts["update_squares"], known.refs
    forks = [place for place in range(1, len(refs)) if refs[place].run != refs[place - 1].run]
    if forks:
        updates = updates.copy(order="K")
    for place in forks:
        found = estimated(history, refs[place - 1], refs[place])
        for tensor, key in enumerate(known.keys):
            if key in found:
                updates[tensor, place] = found[key]["update_norm"] ** 2
    return updates
