"""How tensors move from checkpoint to checkpoint: one number for each tensor, or layer, and step of a run's lineage.

the catalog -> what the statistics say of the steps, and of the way from each to the next
            -> what is equal by checksum to the checkpoint before: has not moved
the tensors -> the rest, where reading can tell it, or where all of it is little
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

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
from dshistory.trends.read_missing import READABLE, read_moves, read_steps
from dshistory.trends.statistics_matrix import Cells, Key, Known, Stored

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["METRICS", "TrajectoryTable", "estimate_move", "fill_rest", "trajectory"]

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
        from dshistory.display import plot

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
    refs = committed_lineage(history.paths, run)
    find = _moves if chosen.is_move else _steps
    found = find(_Question(history, refs, kinds, names, metric, chosen, by, exact, quiet))
    return _table(found, refs, metric, chosen, by=by)


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked for."""

    history: History
    refs: Sequence[CheckpointRef]
    kinds: Patterns
    names: Patterns
    name: str
    metric: Metric
    by: str
    exact: bool
    quiet: bool

    def cells(self) -> AbstractContextManager[Cells]:
        return Cells.chosen(self.history, self.refs, kinds=self.kinds, names=self.names)

    def reading(self, stored: Stored, cells: Known) -> ByteProgress:
        """Progress over the bytes of cells, and, for a move, of those before them."""
        nbytes = stored.nbytes[cells].sum()
        if self.metric.is_move:
            nbytes += stored.nbytes[:, :-1][cells[:, 1:]].sum()
        return ByteProgress(int(nbytes), description=f"trajectory of {self.name}", quiet=self.quiet)


@dataclass(frozen=True, slots=True)
class _Found:
    """The parts of the metric for each cell, and which cells count in a group."""

    keys: Sequence[Key]
    parts: Mapping[str, Floats]
    counts: Known
    note: str = ""


def _steps(asked: _Question) -> _Found:
    """What is said of the checkpoints themselves: by their statistics, by those of equal bytes, or by reading."""
    with asked.cells() as cells:
        known, parts = cells.statistics(asked.metric.parts)
        if known.all():
            return _Found(cells.keys, parts, known)
        keys, stored = cells.keys, cells.stored()
    if set(parts) <= READABLE:
        wanted = stored.there & ~known & ~stored.same
        with asked.reading(stored, wanted) as bar:
            read_steps(asked.history, asked.refs, keys, wanted, parts, bar.advance)
        known = known | wanted
    for place in range(1, len(asked.refs)):
        carried = stored.same[:, place] & ~known[:, place] & known[:, place - 1]
        for values in parts.values():
            values[carried, place] = values[carried, place - 1]
        known[:, place] |= carried
    gaps = int((stored.there & ~known).any(axis=0).sum())
    note = f"unknown at {gaps} checkpoints without statistics: `analyze` computes them" if gaps else ""
    return _Found(keys, parts, stored.there, note)


def _moves(asked: _Question) -> _Found:
    """What is said of the way from the checkpoint before: by sketches, by equal bytes, or by reading."""
    parts: Mapping[str, Floats]
    norms: Floats | None = None
    elsewhere: Sequence[int] = []
    with asked.cells() as cells:
        keys, stored = cells.keys, cells.stored()
        estimating = not asked.exact and stored.nbytes.sum() > AT_ONCE_BYTES and set(asked.metric.parts) <= _SKETCHED
        if estimating:
            parts, elsewhere = cells.moves(asked.metric.parts)
        else:
            parts = {part: np.full(stored.there.shape, np.nan) for part in asked.metric.parts}
        if asked.by != "tensor" and stored.same.any():
            norms = cells.statistics(["squares"])[1]["squares"]
    note = ""
    if estimating:
        _estimate_elsewhere(asked, keys, elsewhere, parts)
        for values in parts.values():
            values[~stored.follows | stored.same] = np.nan
        note = _bound_note(keys, stored, parts[asked.metric.parts[0]])
    fill_rest(parts, stored, norms)
    missing = stored.follows & ~stored.same & np.isnan(sum(parts.values()))
    if missing.any():
        with asked.reading(stored, missing) as bar:
            read_moves(asked.history, asked.refs, keys, missing, parts, bar.advance)
    return _Found(keys, parts, stored.follows, note)


def fill_rest(parts: Mapping[str, Floats], stored: Stored, norms: Floats | None) -> None:
    """What has not moved; its norms, where they are known, matter to a group that it is in."""
    for part, values in parts.items():
        if part in _OF_REST:
            values[stored.same] = _OF_REST[part]
        elif part == "numel":
            values[stored.same] = stored.numel[stored.same]
        elif norms is not None:
            values[stored.same] = norms[stored.same]


def _bound_note(keys: Sequence[Key], stored: Stored, estimates: Floats) -> str:
    told = np.flatnonzero(~np.isnan(estimates).all(axis=1)).tolist()
    buckets = [buckets_of(keys[tensor][0], int(stored.numel[tensor].max())) for tensor in told]
    if not buckets:
        return ""
    return (
        f"where there are sketches estimated from them, updates within about {norm_bound(min(buckets)):.0%} "
        "(exact=True reads the tensors)"
    )


def _table(found: _Found, refs: Sequence[CheckpointRef], name: str, metric: Metric, *, by: str) -> TrajectoryTable:
    """The rows, those of a tensor one after the other."""
    keys, numbers = _groups(found.keys, by)
    parts = found.parts
    if by != "tensor":
        parts = {part: merged(part, cells, found.counts, numbers) for part, cells in parts.items()}
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
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
    if len(refs) == 1 and metric.is_move:
        about += "; there is nothing before it to compare it with"
    table = TrajectoryTable(pa.table(columns, schema=_SCHEMA), note="; ".join(filter(None, [about, found.note])))
    table.metric = name
    return table


def _estimate_elsewhere(
    asked: _Question, keys: Sequence[Key], elsewhere: Sequence[int], parts: Mapping[str, Floats]
) -> None:
    """The catalog counts moves within a run: where a run forks from its parent, the sketches of both sides are compared."""
    refs = asked.refs
    forks = [at for at in range(1, len(refs)) if refs[at].run != refs[at - 1].run]
    for place in sorted({*elsewhere, *forks}):
        estimate_move(asked.history, refs[place - 1], refs[place], keys, place, parts)


def estimate_move(
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
