"""How tensors move from checkpoint to checkpoint: one number for each tensor and step of a run's lineage.

Numbers of a step are about the step itself (its norm, its non-finite elements) or about the way from the checkpoint
before. Not read is what is equal by checksum to the checkpoint before, what the statistics know, and, where much would have
to be read, what sketches can estimate.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.resolve import lineage
from dshistory.comparison import Comparison
from dshistory.differences import AT_ONCE_BYTES, UNCHANGED, compare, select
from dshistory.estimates import estimated
from dshistory.fragments import FragmentStream, StoredTensor
from dshistory.naming import Patterns
from dshistory.progress import ByteProgress
from dshistory.table import Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["METRICS", "TrajectoryTable", "trajectory"]

_OF_A_STEP: Final = {"norm": "norm_after", "nonfinite": "nonfinite_after"}
METRICS: Final = (*_OF_A_STEP, "relative_update", "update_norm", "cosine", "max_change", "changed_share", "sign_flips")

_SCHEMA: Final = pa.schema(
    [("run", pa.string()), ("step", pa.int64()), ("name", pa.string()), ("kind", pa.string()), ("value", pa.float64())]
)


Known = Mapping[tuple[CheckpointRef, str, str], float]


class TrajectoryTable(Table):
    """A row for each tensor and checkpoint; the value is unknown (null) where a tensor is not, has another shape than
    before, or has nothing before it."""

    metric: str

    def plot(self, *, top: int = 12) -> "go.Figure":
        """The values over the steps, a line for each of the `top` tensors that reach highest. Needs the [notebook]
        extra."""
        from dshistory import plot

        return plot.trajectories(self, metric=self.metric, top=top)


def trajectory(
    history: History, *, names: Patterns, metric: str, kinds: Patterns, run: str | None, exact: bool, quiet: bool
) -> TrajectoryTable:
    """See `Explorer.trajectory`."""
    if metric not in METRICS:
        raise NotFoundError(f"no metric {metric!r}; the metrics are {', '.join(METRICS)}")
    refs = lineage(history, run or history.current_run())
    if not refs:
        raise NotFoundError(f"run {run or history.current_run()} of {history.root} has no committed checkpoint yet")
    steps = select(history, *refs, kinds=kinds, names=names)
    keys = sorted({key for step in steps for key in step})
    read = sum(tensor.nbytes for step in steps for tensor in step.values())
    known: Known = {}
    bound = 0.0
    if metric in _OF_A_STEP:
        known = _computed(history, refs, metric)
    elif not exact and read > AT_ONCE_BYTES:
        known, bound = _estimated(history, refs, metric)
    rows = []
    with ByteProgress(read, description=f"trajectory of {metric}", quiet=quiet) as bar:
        for key in keys:
            path = [step.get(key) for step in steps]
            of_key = [known.get((ref, *key)) for ref in refs]
            values = _values(history.root, path, metric, of_key, bar.advance)
            rows += [_row(ref, key[1], key[0], value) for ref, value in zip(refs, values, strict=True)]
    note = f"{metric} of {len(keys)} tensors over {len(refs)} checkpoints"
    if bound:
        note += f"; where there are sketches estimated from them, updates within about {bound:.0%} (exact=True reads the tensors)"
    table = TrajectoryTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)
    table.metric = metric
    return table


def _computed(history: History, refs: Sequence[CheckpointRef], metric: str) -> Known:
    """What the statistics say of the steps themselves; exact."""
    column = {"norm": "norm", "nonfinite": "nan + inf"}[metric]
    sql = f"SELECT run, step, kind, name, {column} AS value FROM statistics WHERE list_contains($runs, run)"
    rows = history.query(sql, {"runs": sorted({ref.run for ref in refs})}).to_pylist()
    return {(CheckpointRef(row["run"], row["step"]), row["kind"], row["name"]): float(row["value"]) for row in rows}


def _estimated(history: History, refs: Sequence[CheckpointRef], metric: str) -> tuple[Known, float]:
    """What sketches say of the way from each checkpoint to the next, and the largest bound of it."""
    known: dict[tuple[CheckpointRef, str, str], float] = {}
    bound = 0.0
    for before, after in pairwise(refs):
        for (kind, name), numbers in estimated(history, before, after).items():
            if numbers.get(metric) is not None:
                known[after, kind, name] = numbers[metric]
                bound = max(bound, numbers["bound"])
    return known, bound


def _values(
    root: Path,
    path: Sequence[StoredTensor | None],
    metric: str,
    known: Sequence[float | None],
    advance: Callable[[int], None],
) -> list[float | None]:
    values: list[float | None] = []
    for before, after, value in zip([None, *path], path, known, strict=False):
        if after is None:
            values.append(None)
            continue
        same = before is not None and before.same_bytes(after)
        if value is not None and not same:
            values.append(value)
        elif metric in _OF_A_STEP:
            values.append(values[-1] if same else _number(_alone(root, after, advance), _OF_A_STEP[metric]))
        elif same:
            values.append(UNCHANGED.get(metric))
        elif before is None or before.shape != after.shape:
            values.append(None)
        else:
            values.append(_number(compare(root, before, after, lambda nbytes: advance(nbytes // 2)), metric))
    return values


def _alone(root: Path, tensor: StoredTensor, advance: Callable[[int], None]) -> Comparison:
    """The tensor compared with itself: what can be said of one step."""
    comparison = Comparison()
    stream = FragmentStream(root, tensor)
    while numel := stream.ready():
        part = stream.take(numel)
        comparison.add(part, part)
        advance(part.nbytes)
    return comparison


def _number(comparison: Comparison, metric: str) -> float | None:
    value = getattr(comparison, metric)
    return None if value is None else float(value)


def _row(ref: CheckpointRef, name: str, kind: str, value: float | None) -> Mapping[str, object]:
    return {"run": ref.run, "step": ref.step, "name": name, "kind": kind, "value": value}
