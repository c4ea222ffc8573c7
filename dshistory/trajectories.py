"""How tensors move from checkpoint to checkpoint: one exact number for each tensor and step of a run's lineage.

Numbers of a step are about the step itself (its norm, its non-finite elements) or about the way from the checkpoint
before. What is equal by checksum to the checkpoint before is not read again.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.resolve import lineage
from dshistory.comparison import Comparison
from dshistory.differences import UNCHANGED, compare, select
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
    history: History, *, names: Patterns, metric: str, kinds: Patterns, run: str | None, quiet: bool
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
    rows = []
    with ByteProgress(read, description=f"trajectory of {metric}", quiet=quiet) as bar:
        for kind, name in keys:
            path = [step.get((kind, name)) for step in steps]
            values = _values(history.root, path, metric, bar.advance)
            rows += [_row(ref, name, kind, value) for ref, value in zip(refs, values, strict=True)]
    note = f"{metric} of {len(keys)} tensors over {len(refs)} checkpoints"
    table = TrajectoryTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note)
    table.metric = metric
    return table


def _values(
    root: Path, path: Sequence[StoredTensor | None], metric: str, advance: Callable[[int], None]
) -> list[float | None]:
    values: list[float | None] = []
    for before, after in zip([None, *path], path, strict=False):
        if after is None:
            values.append(None)
            continue
        same = before is not None and before.same_bytes(after)
        if metric in _OF_A_STEP:
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
