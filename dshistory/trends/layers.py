"""One figure for each layer and checkpoint: the table behind the explorer's heat map.

Figures that statistics and sketches give come from the catalog alone, and are null, never zero, where it has none: no
tensor is read for a picture of all of them. Tensors are read only for figures that no statistics give, as for a
trajectory by layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from catalog.statistics.compute import buckets_of
from dshistory.comparison.grouping import layer_of
from dshistory.comparison.sketch_estimates import norm_bound
from dshistory.display.formats import Format, counted
from dshistory.metrics import Floats, Metric, merged, metric_named, movement, rms, typical_size
from dshistory.patterns import Patterns, natural_order
from dshistory.trends.layers_table import LayersTable
from dshistory.trends.statistics_matrix import Key, Known, StatisticsMatrix, Stored
from dshistory.trends.trajectory import estimate_update, fill_unchanged, trajectory

__all__ = ["layers"]

_SCHEMA: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("layer", pa.string()),
        ("kind", pa.string()),
        ("value", pa.float64()),
        ("tensors", pa.int64()),
        ("most", pa.string()),
        ("bound", pa.float64()),
    ]
)
_FORMATS: Final[dict[str, Format]] = {"bound": "share"}
_READ: Final = frozenset({"max_change", "changed", "sign_flips"})
"""Parts of figures that only the tensors themselves give."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The matrix of each part of the figure, tensors x checkpoints; `known` is true where all parts are, `bounds` are
    the bounds of the figure, and `numel` the numbers of elements where the figure is about an update."""

    keys: Sequence[Key]
    parts: Mapping[str, Floats]
    known: Known
    bounds: Floats
    numel: Floats


def layers(
    history: History,
    *,
    names: Patterns,
    metric: str,
    kinds: Patterns,
    run: str | None,
    first: int | None,
    last: int | None,
    quiet: bool,
) -> LayersTable:
    """See `Explorer.layers`."""
    chosen = metric_named(metric)
    run = run or history.current_run()
    path = committed_lineage(history.paths, run)
    shown = [ref for ref in path if (first is None or ref.step >= first) and (last is None or ref.step <= last)]
    if not shown:
        steps = f"{path[0].step} to {path[-1].step}"
        raise NotFoundError(f"run {run} has no checkpoint from step {first} to {last}; it has those from {steps}")
    refs = path[max(0, path.index(shown[0]) - 1) : path.index(shown[-1]) + 1]
    if not _READ.isdisjoint(chosen.parts):
        tensors = _read(history, path, names=names, metric=metric, kinds=kinds, run=run, quiet=quiet)
        refs = path
    elif chosen.is_update:
        tensors = _update_parts(history, refs, chosen, names=names, kinds=kinds)
    else:
        tensors = _step_parts(history, refs, chosen, names=names, kinds=kinds)
    rows = _rows(tensors, chosen, metric, refs, since=refs.index(shown[0]), count=len(shown))
    table = LayersTable(rows, formats=_FORMATS, note=_note(rows, metric, is_update=chosen.is_update))
    table.metric = metric
    table.since = {after.step: before.step for before, after in pairwise(refs)} if chosen.is_update else {}
    return table


def _step_parts(
    history: History, refs: Sequence[CheckpointRef], chosen: Metric, *, names: Patterns, kinds: Patterns
) -> _Tensors:
    """Take the parts of a figure about a checkpoint from its statistics."""
    with StatisticsMatrix.chosen(history, refs, kinds=kinds, names=names) as matrix:
        known, parts = matrix.statistics(chosen.parts)
    _require_some(known, refs)
    return _Tensors(matrix.keys, parts, known, np.zeros(known.shape), np.zeros(known.shape))


def _update_parts(
    history: History, refs: Sequence[CheckpointRef], chosen: Metric, *, names: Patterns, kinds: Patterns
) -> _Tensors:
    """Estimate the parts of a figure about the way from the checkpoint before: from sketches, and by equal
    checksums."""
    with StatisticsMatrix.chosen(history, refs, kinds=kinds, names=names) as matrix:
        keys, stored = matrix.keys, matrix.stored()
        parts, elsewhere = matrix.updates(chosen.parts)
        estimates = not all(np.isnan(values).all() for values in parts.values())
        # The norms of unchanged tensors count in their layer; without any estimate, statistics may be missing
        # altogether.
        needed = stored.same.any() or not estimates
        analyzed, squares = matrix.statistics(["squares"]) if needed else (stored.there, {})
    _require_some(analyzed, refs)
    forks = [at for at in range(1, len(refs)) if refs[at].run != refs[at - 1].run]
    for place in sorted({*elsewhere, *forks}):
        estimate_update(history, refs[place - 1], refs[place], keys, place, parts)
    for values in parts.values():
        values[~stored.follows | stored.same] = np.nan
    fill_unchanged(parts, stored, squares.get("squares"))
    known: Known = ~np.isnan(sum(parts.values()))
    return _Tensors(keys, parts, known, _bounds(keys, stored), stored.numel.astype(np.float64))


def _require_some(analyzed: Known, refs: Sequence[CheckpointRef]) -> None:
    if not analyzed.any():
        raise NotFoundError(f"no checkpoint from {refs[0]} to {refs[-1]} has statistics yet: `analyze` computes them")


def _bounds(keys: Sequence[Key], stored: Stored) -> Floats:
    of_key = [norm_bound(max(1, buckets_of(kind, int(stored.numel[i].max())))) for i, (kind, _) in enumerate(keys)]
    return np.where(stored.same, 0.0, np.array(of_key)[:, None])


def _read(
    history: History,
    path: Sequence[CheckpointRef],
    *,
    names: Patterns,
    metric: str,
    kinds: Patterns,
    run: str,
    quiet: bool,
) -> _Tensors:
    """Read the parts from the tensors, as a trajectory does."""
    patterns = {"names": names, "kinds": kinds}
    table = trajectory(history, **patterns, metric=metric, by="tensor", runs=[run], exact=False, quiet=quiet)
    with StatisticsMatrix.chosen(history, path, **patterns) as matrix:
        numel = matrix.stored().numel.astype(np.float64)
    values = table["value"].to_numpy().reshape(numel.shape)
    parts: dict[str, Floats] = {part: values for part in metric_named(metric).parts if part in _READ}
    if "changed" in parts:
        parts = {"changed": values * numel, "numel": numel}
    return _Tensors(matrix.keys, parts, ~np.isnan(values), np.zeros(values.shape), numel)


def _rows(
    tensors: _Tensors, chosen: Metric, metric: str, refs: Sequence[CheckpointRef], *, since: int, count: int
) -> pa.Table:
    """Build a row for each line and each of `count` checkpoints from the place `since` on."""
    of_key = [(kind, layer_of(name)) for kind, name in tensors.keys]
    lines = sorted(set(of_key), key=lambda line: (line[0], natural_order(line[1])))
    groups = np.array([lines.index(line) for line in of_key])
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(len(lines)))
    counts = np.add.reduceat(tensors.known[order].astype(np.int64), starts, axis=0)
    bounds = np.maximum.reduceat(np.where(tensors.known, tensors.bounds, 0.0)[order], starts, axis=0)
    values = chosen.value(*(merged(part, tensors.parts[part], tensors.known, groups) for part in chosen.parts))
    cut = np.s_[:, since : since + count]
    unknown = counts[cut].ravel() == 0
    shown = refs[since : since + count]
    columns = [
        pa.array([ref.run for ref in shown] * len(lines), pa.string()),
        pa.array([ref.step for ref in shown] * len(lines), pa.int64()),
        pa.array([layer for _, layer in lines for _ in shown], pa.string()),
        pa.array([kind for kind, _ in lines for _ in shown], pa.string()),
        pa.array(values[cut].ravel(), mask=unknown | np.isnan(values[cut].ravel())),
        pa.array(counts[cut].ravel(), mask=unknown),
        pa.array(_standing_out(tensors, chosen, metric, groups)[cut].ravel().tolist(), pa.string()),
        pa.array(bounds[cut].ravel(), mask=unknown),
    ]
    return pa.table(columns, schema=_SCHEMA)


def _standing_out(
    tensors: _Tensors, chosen: Metric, metric: str, groups: npt.NDArray[np.int64]
) -> npt.NDArray[np.object_]:
    """Return (lines, checkpoints): the name of the tensor with the highest figure, for cosine and min the lowest, or
    None. Of relative updates, the tensor that moved most, where a small one counts as one of typical size: a bias that
    was born at zero does not stand out by that."""
    values = chosen.value(*(tensors.parts[part] for part in chosen.parts))
    if chosen is metric_named("relative_update"):
        values = _movements(tensors)
    values = np.where(tensors.known & ~np.isnan(values), values * (-1 if metric in ("cosine", "min") else 1), -np.inf)
    names = np.array([name for _, name in tensors.keys], np.object_)
    most = np.empty((groups.max() + 1, values.shape[1]), np.object_)
    for line in range(len(most)):
        members = np.flatnonzero(groups == line)
        found = names[members][values[members].argmax(axis=0)]
        most[line] = np.where(tensors.known[members].any(axis=0), found, None)
    return most


def _movements(tensors: _Tensors) -> Floats:
    """Return how far each tensor moved relative to its length, or to that of a typical tensor of its kind."""
    update, before = (tensors.parts[part] for part in ("update_squares", "before_squares"))
    result = np.full(update.shape, np.nan)
    kinds = np.array([kind for kind, _ in tensors.keys])
    for kind in dict.fromkeys(kinds.tolist()):
        rows = np.flatnonzero(kinds == kind)
        numel = tensors.numel[rows]
        typical = typical_size(rms(before[rows], numel), numel)
        result[rows] = movement(update[rows], before[rows], numel, typical)
    return result


def _note(rows: pa.Table, metric: str, *, is_update: bool) -> str:
    lines = rows.select(["kind", "layer"]).group_by(["kind", "layer"]).aggregate([]).num_rows
    steps = set(rows["step"].to_pylist())
    note = f"{metric} of {counted(lines, 'layer')} over {counted(len(steps), 'checkpoint')}"
    bound = pc.max(rows["bound"]).as_py()
    if bound:
        note += f", estimated from the sketches of tensors, within about {bound:.0%}"
    unknown = len(steps - _steps_with(rows, "tensors"))
    nonfinite = len(steps - _steps_with(rows, "value")) - unknown
    if unknown and not is_update:
        note += f"; no statistics of {counted(unknown, 'checkpoint')}: `analyze` computes them"
    elif unknown > 1:
        note += (
            f"; unknown at {counted(unknown, 'checkpoint')}: the first, those that are not finite, "
            "and those without statistics, which `analyze` computes"
        )
    if nonfinite:
        note += f"; not finite at {counted(nonfinite, 'checkpoint')}"
    return note


def _steps_with(rows: pa.Table, column: str) -> set[int]:
    """Return the steps that have a row with a value in that column."""
    return set(rows.filter(pc.is_valid(rows[column]))["step"].to_pylist())
