"""How tensors move from checkpoint to checkpoint: one number for each tensor, or layer, and step of a run's lineage.

the catalog -> what the statistics say of the steps, and of the way from each to the next
            -> what is equal by checksum to the checkpoint before: has not moved
the tensors -> the rest, where reading can tell it, or where all of it is little
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from catalog.analysis import buckets_of
from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.resolve import lineage
from dshistory.cells import Cells, Key, Known, Stored
from dshistory.differences import AT_ONCE_BYTES
from dshistory.estimates import estimated, norm_bound
from dshistory.gaps import READABLE, read_moves, read_steps
from dshistory.grouping import layer_of, require_grouping
from dshistory.metrics import METRICS, Floats, Metric, merged, metric_named
from dshistory.naming import Patterns
from dshistory.progress import ByteProgress
from dshistory.table import Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["METRICS", "TrajectoryTable", "trajectory"]

_SCHEMA: Final = pa.schema(
    [("run", pa.string()), ("step", pa.int64()), ("name", pa.string()), ("kind", pa.string()), ("value", pa.float64())]
)
_SKETCHED: Final = frozenset({"update_squares", "before_squares", "squares", "dot"})
"""Parts that sketches can estimate."""

_OF_REST: Final = {"update_squares": 0.0, "max_change": 0.0, "changed": 0.0, "sign_flips": 0.0}
"""Parts of a tensor that has not moved."""


class TrajectoryTable(Table):
    """A row for each tensor (or layer, or kind) and checkpoint; the value is unknown (null) where a tensor is not, has another
    shape than before, has nothing before it, or where there are no statistics and reading was not asked for."""

    metric: str

    def plot(self, *, top: int = 12) -> "go.Figure":
        """The values over the steps, a line for each of the `top` tensors that reach highest. Needs the [notebook]
        extra."""
        from dshistory import plot

        return plot.trajectories(self, metric=self.metric, top=top)


def trajectory(
    history: History,
    *,
    names: Patterns,
    metric: str,
    kinds: Patterns,
    by: str,
    run: str | None,
    exact: bool,
    quiet: bool,
) -> TrajectoryTable:
    """See `Explorer.trajectory`."""
    chosen = metric_named(metric)
    require_grouping(by)
    refs = lineage(history, run or history.current_run())
    if not refs:
        raise NotFoundError(f"run {run or history.current_run()} of {history.root} has no committed checkpoint yet")
    work = _Trajectory(Cells(history, refs, kinds=kinds, names=names), metric, chosen, by=by, quiet=quiet)
    if chosen.is_move:
        work.moves(exact=exact)
    else:
        work.steps()
    return work.table()


class _Trajectory:
    """One trajectory on its way: `parts` fill up, and `notes` say how."""

    def __init__(self, cells: Cells, name: str, metric: Metric, *, by: str, quiet: bool) -> None:
        self._cells = cells
        self._name = name
        self._metric = metric
        self._by = by
        self._quiet = quiet
        self._notes: list[str] = []
        self._present: Known
        self._parts: Mapping[str, Floats]

    def steps(self) -> None:
        """What is said of the checkpoints themselves: by their statistics, by those of equal bytes, or by reading."""
        known, self._parts = self._cells.statistics(self._metric.parts)
        self._present = known
        if known.all():
            return
        cells, stored = self._cells, self._cells.stored()
        self._present = stored.there
        if set(self._metric.parts) <= READABLE:
            wanted = stored.there & ~known & ~stored.same
            with self._reading(stored, wanted) as bar:
                read_steps(cells.history, cells.refs, cells.keys, wanted, self._parts, bar.advance)
            known = known | wanted
        for place in range(1, len(cells.refs)):
            carried = stored.same[:, place] & ~known[:, place] & known[:, place - 1]
            for values in self._parts.values():
                values[carried, place] = values[carried, place - 1]
            known[:, place] |= carried
        gaps = int((stored.there & ~known).any(axis=0).sum())
        if gaps:
            self._notes.append(f"unknown at {gaps} checkpoints without statistics: `analyze` computes them")

    def moves(self, *, exact: bool) -> None:
        """What is said of the way from the checkpoint before: by sketches, by equal bytes, or by reading."""
        cells, parts = self._cells, self._metric.parts
        stored = cells.stored()
        self._present = stored.follows
        if not exact and stored.nbytes.sum() > AT_ONCE_BYTES and set(parts) <= _SKETCHED:
            self._parts = self._estimated(stored)
        else:
            self._parts = {part: np.full(stored.there.shape, np.nan) for part in parts}
        self._fill_rest(stored)
        unknown = np.logical_or.reduce([np.isnan(values) for values in self._parts.values()])
        missing = stored.follows & ~stored.same & unknown
        if missing.any():
            with self._reading(stored, missing) as bar:
                read_moves(cells.history, cells.refs, cells.keys, missing, self._parts, bar.advance)

    def table(self) -> TrajectoryTable:
        """The rows, those of a tensor one after the other."""
        keys, numbers = _groups(self._cells.keys, self._by)
        parts = self._parts
        if self._by != "tensor":
            parts = {part: merged(part, cells, self._present, numbers) for part, cells in parts.items()}
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            values = self._metric.value(*(parts[part] for part in self._metric.parts))
        refs = self._cells.refs
        of_key, of_ref = np.repeat(np.arange(len(keys)), len(refs)), np.tile(np.arange(len(refs)), len(keys))
        columns = [
            pa.array([ref.run for ref in refs], pa.string()).take(of_ref),
            pa.array([ref.step for ref in refs], pa.int64()).take(of_ref),
            pa.array([name for _, name in keys], pa.string()).take(of_key),
            pa.array([kind for kind, _ in keys], pa.string()).take(of_key),
            pa.array(values.ravel(), mask=np.isnan(values.ravel())),
        ]
        about = f"{self._name} of {len(keys)} {self._by}s over {len(refs)} checkpoints"
        table = TrajectoryTable(pa.table(columns, schema=_SCHEMA), note="; ".join([about, *self._notes]))
        table.metric = self._name
        return table

    def _reading(self, stored: Stored, missing: Known) -> ByteProgress:
        nbytes = stored.nbytes[missing].sum()
        if self._metric.is_move:
            nbytes += stored.nbytes[:, :-1][missing[:, 1:]].sum()
        return ByteProgress(int(nbytes), description=f"trajectory of {self._name}", quiet=self._quiet)

    def _estimated(self, stored: Stored) -> Mapping[str, Floats]:
        """Of the catalog's moves, and where a run forks from its parent by the sketches of both sides."""
        cells = self._cells
        parts, elsewhere = cells.moves(self._metric.parts)
        forks = [at for at in range(1, len(cells.refs)) if cells.refs[at].run != cells.refs[at - 1].run]
        for place in sorted({*elsewhere, *forks}):
            _estimate(cells.history, cells.refs[place - 1], cells.refs[place], cells.keys, place, parts)
        for values in parts.values():
            values[~stored.follows | stored.same] = np.nan
        told = np.flatnonzero(~np.isnan(parts[self._metric.parts[0]]).all(axis=1)).tolist()
        buckets = [buckets_of(cells.keys[tensor][0], int(stored.numel[tensor].max())) for tensor in told]
        if buckets:
            self._notes.append(
                f"where there are sketches estimated from them, updates within about {norm_bound(min(buckets)):.0%} "
                "(exact=True reads the tensors)"
            )
        return parts

    def _fill_rest(self, stored: Stored) -> None:
        """What has not moved: its norms matter to a group that it is in."""
        same = stored.same
        for part, values in self._parts.items():
            if part in _OF_REST:
                values[same] = _OF_REST[part]
            elif part == "numel":
                values[same] = stored.numel[same]
        norms = self._parts.keys() & {"before_squares", "squares", "dot"}
        if self._by != "tensor" and norms and same.any():
            _, at_rest = self._cells.statistics(["squares"])
            for part in norms:
                self._parts[part][same] = at_rest["squares"][same]


def _estimate(
    history: History,
    before: CheckpointRef,
    after: CheckpointRef,
    keys: Sequence[Key],
    place: int,
    parts: Mapping[str, Floats],
) -> None:
    """Fill in the cells of a place from the sketches of two checkpoints."""
    found = estimated(history, before, after)
    for tensor, key in enumerate(keys):
        numbers = found.get(key)
        if numbers is not None:
            start, end = numbers["norm_before"], numbers["norm_after"]
            cosine = np.nan if numbers["cosine"] is None else numbers["cosine"]
            of_part = {
                "update_squares": numbers["update_norm"] ** 2,
                "before_squares": start**2,
                "squares": end**2,
                "dot": cosine * start * end,
            }
            for part, values in parts.items():
                values[tensor, place] = of_part[part]


def _groups(keys: Sequence[Key], by: str) -> tuple[Sequence[Key], np.ndarray]:
    """The groups of tensors, and the number of each tensor's."""
    if by == "tensor":
        return keys, np.arange(len(keys))
    groups: dict[Key, int] = {}
    numbers = [groups.setdefault((kind, layer_of(name) if by == "layer" else "*"), len(groups)) for kind, name in keys]
    return list(groups), np.array(numbers)
