"""The trajectory of a metric: one figure for each tensor, or layer, and checkpoint of a run's lineage.

The parts of the figure come from three sources, in this order, cell by cell (tensor x checkpoint):

the catalog's statistics and sketches -> parts of a checkpoint, and estimates of the update since the checkpoint before
the checksums                         -> a tensor equal to that in the checkpoint before has not changed
the tensors themselves                -> cells that are still unknown, of parts that reading gives
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from catalog.statistics.compute import buckets_of
from dshistory.comparison.diff import AT_ONCE_BYTES
from dshistory.comparison.grouping import layer_of, require_grouping
from dshistory.comparison.sketch_estimates import estimated, norm_bound
from dshistory.display.formats import counted
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.metrics import METRICS, Floats, Metric, merged, metric_named
from dshistory.patterns import Patterns
from dshistory.trends.read_missing import READABLE, read_steps, read_updates
from dshistory.trends.statistics_matrix import Key, Known, StatisticsMatrix, Stored

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["METRICS", "TrajectoryTable", "estimate_update", "fill_unchanged", "trajectory"]

_SCHEMA: Final = pa.schema(
    [("run", pa.string()), ("step", pa.int64()), ("name", pa.string()), ("kind", pa.string()), ("value", pa.float64())]
)
_SKETCHED: Final = frozenset({"update_squares", "before_squares", "squares", "dot"})
"""Parts that sketches estimate."""

_UNCHANGED: Final = {"update_squares": 0.0, "max_change": 0.0, "changed": 0.0, "sign_flips": 0.0}
"""Parts of a tensor that has not changed."""


class TrajectoryTable(Table):
    """A row for each tensor (or layer, or kind) and checkpoint.

    The value is null where the checkpoint does not have the tensor, where the metric is about an update and the
    checkpoint before does not have the tensor in that shape, and where the statistics are missing and reading would not
    give the value."""

    metric: str

    def plot(self, *, top: int = 12) -> "go.Figure":
        """Draw the values over the steps, a line for each of the `top` tensors that reach highest. Needs the [notebook]
        extra."""
        from dshistory.display import plot

        return plot.trajectories(self, metric=self.metric, top=top)

    def joined(self, other: "TrajectoryTable") -> "TrajectoryTable":
        """Return the rows of both, each checkpoint once: two runs may have parents in common."""
        mine = {(row["run"], row["step"]) for row in self.to_arrow().select(["run", "step"]).to_pylist()}
        rows = other.to_arrow()
        places = zip(rows["run"].to_pylist(), rows["step"].to_pylist(), strict=True)
        new = rows.filter(pa.array([place not in mine for place in places], pa.bool_()))
        made = TrajectoryTable(pa.concat_tables([self.to_arrow(), new]), note=f"{self.note}; {other.note}")
        made.metric = self.metric
        return made


def trajectory(
    history: History,
    *,
    names: Patterns,
    metric: str,
    kinds: Patterns,
    by: str,
    runs: Sequence[str | None],
    exact: bool,
    quiet: bool,
) -> TrajectoryTable:
    """See `Explorer.trajectory`; None is the current run."""
    chosen = metric_named(metric)
    require_grouping(by)
    find = _update_parts if chosen.is_update else _step_parts
    table: TrajectoryTable | None = None
    for run in runs:
        refs = committed_lineage(history.paths, run)
        found = find(_Question(history, refs, kinds, names, metric, chosen, by, exact, quiet))
        one = _table(found, refs, metric, chosen, by=by)
        table = one if table is None else table.joined(one)
    if table is None:
        raise SetupError("trajectory: run=[]: name a run, or give None for the current one")
    return table


@dataclass(frozen=True, slots=True)
class _Question:
    """The arguments of `trajectory`, resolved."""

    history: History
    refs: Sequence[CheckpointRef]
    kinds: Patterns
    names: Patterns
    name: str
    metric: Metric
    by: str
    exact: bool
    quiet: bool

    def matrix(self) -> AbstractContextManager[StatisticsMatrix]:
        return StatisticsMatrix.chosen(self.history, self.refs, kinds=self.kinds, names=self.names)

    def reading(self, stored: Stored, cells: Known) -> ByteProgress:
        """Return a progress bar over the bytes of these cells and, for an update, of those in the checkpoints
        before."""
        nbytes = stored.nbytes[cells].sum()
        if self.metric.is_update:
            nbytes += stored.nbytes[:, :-1][cells[:, 1:]].sum()
        return ByteProgress(int(nbytes), description=f"trajectory of {self.name}", quiet=self.quiet)


@dataclass(frozen=True, slots=True)
class _Found:
    """The matrix of each part of the metric, and the cells that count when tensors are grouped."""

    keys: Sequence[Key]
    parts: Mapping[str, Floats]
    counts: Known
    note: str = ""


def _step_parts(asked: _Question) -> _Found:
    """Find the parts of a figure about a checkpoint: in its statistics, in those of equal bytes before it, or by
    reading."""
    with asked.matrix() as matrix:
        known, parts = matrix.statistics(asked.metric.parts)
        if known.all():
            return _Found(matrix.keys, parts, known)
        keys, stored = matrix.keys, matrix.stored()
    if set(parts) <= READABLE:
        wanted = stored.there & ~known & ~stored.same
        with asked.reading(stored, wanted) as bar:
            known = known | read_steps(asked.history, asked.refs, keys, wanted, parts, bar.advance)
    # In ascending order, so that a value is carried on over any number of checkpoints in which the tensor does not
    # change.
    for place in range(1, len(asked.refs)):
        carried = stored.same[:, place] & ~known[:, place] & known[:, place - 1]
        for values in parts.values():
            values[carried, place] = values[carried, place - 1]
        known[:, place] |= carried
    missing = int((stored.there & ~known).any(axis=0).sum())
    note = f"unknown at {missing} checkpoints without statistics: `analyze` computes them" if missing else ""
    return _Found(keys, parts, stored.there, note)


def _update_parts(asked: _Question) -> _Found:
    """Find the parts of a figure about the way from the checkpoint before: in sketches, by equal checksums, or by
    reading."""
    parts: Mapping[str, Floats]
    squares: Floats | None = None
    elsewhere: Sequence[int] = []
    with asked.matrix() as matrix:
        keys, stored = matrix.keys, matrix.stored()
        estimating = not asked.exact and stored.nbytes.sum() > AT_ONCE_BYTES and set(asked.metric.parts) <= _SKETCHED
        if estimating:
            parts, elsewhere = matrix.updates(asked.metric.parts)
        else:
            parts = {part: np.full(stored.there.shape, np.nan) for part in asked.metric.parts}
        if asked.by != "tensor" and stored.same.any():
            squares = matrix.statistics(["squares"])[1]["squares"]
    note = ""
    if estimating:
        _estimate_elsewhere(asked, keys, elsewhere, parts)
        for values in parts.values():
            values[~stored.follows | stored.same] = np.nan
        note = _bound_note(keys, stored, parts[asked.metric.parts[0]])
    fill_unchanged(parts, stored, squares)
    missing = stored.follows & ~stored.same & np.isnan(sum(parts.values()))
    if missing.any():
        with asked.reading(stored, missing) as bar:
            read_updates(asked.history, asked.refs, keys, missing, parts, bar.advance)
    return _Found(keys, parts, stored.follows, note)


def fill_unchanged(parts: Mapping[str, Floats], stored: Stored, squares: Floats | None) -> None:
    """Fill in the `parts` of tensors that are equal to those in the checkpoint before.

    `squares` are the sums of squares where they are known. They do not matter for the figure of the tensor alone, but
    for that of a group that the tensor belongs to."""
    for part, values in parts.items():
        if part in _UNCHANGED:
            values[stored.same] = _UNCHANGED[part]
        elif part == "numel":
            values[stored.same] = stored.numel[stored.same]
        elif squares is not None:
            values[stored.same] = squares[stored.same]


def _bound_note(keys: Sequence[Key], stored: Stored, estimates: Floats) -> str:
    estimated_tensors = np.flatnonzero(~np.isnan(estimates).all(axis=1)).tolist()
    buckets = [buckets_of(keys[tensor][0], int(stored.numel[tensor].max())) for tensor in estimated_tensors]
    if not buckets:
        return ""
    return (
        f"estimated from sketches where there are some, updates within about {norm_bound(min(buckets)):.0%} "
        "(exact=True reads the tensors)"
    )


def _table(found: _Found, refs: Sequence[CheckpointRef], name: str, metric: Metric, *, by: str) -> TrajectoryTable:
    """Build the rows, ordered by tensor and then by checkpoint."""
    keys, numbers = _groups(found.keys, by)
    parts = found.parts
    if by != "tensor":
        parts = {part: merged(part, values, found.counts, numbers) for part, values in parts.items()}
    values = metric.value(*(parts[part] for part in metric.parts)).ravel()
    of_key, of_ref = np.repeat(np.arange(len(keys)), len(refs)), np.tile(np.arange(len(refs)), len(keys))
    columns = [
        pa.array([ref.run for ref in refs], pa.string()).take(of_ref),
        pa.array([ref.step for ref in refs], pa.int64()).take(of_ref),
        pa.array([name for _, name in keys], pa.string()).take(of_key),
        pa.array([kind for kind, _ in keys], pa.string()).take(of_key),
        pa.array(values, mask=np.isnan(values)),
    ]
    about = f"{name} of {counted(len(keys), by)} over {counted(len(refs), 'checkpoint')}"
    if len(refs) == 1 and metric.is_update:
        about += "; there is nothing before it to compare it with"
    table = TrajectoryTable(pa.table(columns, schema=_SCHEMA), note="; ".join(filter(None, [about, found.note])))
    table.metric = name
    return table


def _estimate_elsewhere(
    asked: _Question, keys: Sequence[Key], elsewhere: Sequence[int], parts: Mapping[str, Floats]
) -> None:
    """Estimate the update at forks and at the places `elsewhere`: the catalog computes updates within a run only."""
    refs = asked.refs
    forks = [at for at in range(1, len(refs)) if refs[at].run != refs[at - 1].run]
    for place in sorted({*elsewhere, *forks}):
        estimate_update(asked.history, refs[place - 1], refs[place], keys, place, parts)


def estimate_update(
    history: History,
    before: CheckpointRef,
    after: CheckpointRef,
    keys: Sequence[Key],
    place: int,
    parts: Mapping[str, Floats],
) -> None:
    """Fill in the cells of one place from the sketches of two checkpoints; the sums follow from the estimated
    figures."""
    found = estimated(history, before, after)
    for tensor, key in enumerate(keys):
        figures = found.get(key)
        if figures is not None:
            norm_before, norm_after = figures["norm_before"], figures["norm_after"]
            cosine = np.nan if figures["cosine"] is None else figures["cosine"]
            sums = {
                "update_squares": figures["update_norm"] ** 2,
                "before_squares": norm_before**2,
                "squares": norm_after**2,
                "dot": cosine * norm_before * norm_after,
            }
            for part, values in parts.items():
                values[tensor, place] = sums[part]


def _groups(keys: Sequence[Key], by: str) -> tuple[Sequence[Key], np.ndarray]:
    """Return the groups of tensors, and the number of each tensor's group."""
    if by == "tensor":
        return keys, np.arange(len(keys))
    groups: dict[Key, int] = {}
    numbers = [groups.setdefault((kind, layer_of(name) if by == "layer" else "*"), len(groups)) for kind, name in keys]
    return list(groups), np.array(numbers)
