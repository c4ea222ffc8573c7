"""Runs side by side, aligned by step: their losses, and how far apart their weights are, in all and by layer."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.lineage_metrics import lineage_metrics
from catalog.nearest_names import nearest
from catalog.records import CheckpointRef
from catalog.references import lineage
from dshistory.comparison.diff import diff
from dshistory.display.progress import CountProgress
from dshistory.display.scale import Picture, Scale
from dshistory.display.table import Table
from dshistory.patterns import Patterns, natural_order

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["ComparedRuns", "compare"]

_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("run", pa.string()),
        ("loss", pa.float64()),
        ("loss_difference", pa.float64()),
        ("distance", pa.float64()),
        ("furthest_layer", pa.string()),
    ]
)
_LAYERS: Final = pa.schema(
    [("run", pa.string()), ("layer", pa.string()), ("step", pa.int64()), ("distance", pa.float64())]
)


class ComparedRuns(Table):
    """A row for each step and run but the first: its loss, that minus the first run's, and the distance of its weights
    from the first run's, relative to their norm.

    The distance is null where not both have a checkpoint, and where the norm of an equal layer is unknown, because the
    first run's checkpoint has no statistics (`analyze`). `furthest_layer` is the layer that is furthest away, relative
    to its own norm.
    """

    runs: Sequence[str]
    """The runs, the first one is that from which the others are measured."""
    layers: Table
    """The distance of every layer: run, layer, step, distance."""
    metrics: Mapping[str, Mapping[str, Mapping[int, float]]]
    """The metrics of every run by name and step, those of its parents included."""

    def parted(self) -> dict[str, int | None]:
        """Return, for each run, the first step at which a loss or a weight differs from the first run's."""
        apart: dict[str, int | None] = dict.fromkeys(self.runs[1:])
        for row in self:
            if apart[row["run"]] is None and (row["loss_difference"] or row["distance"]):
                apart[row["run"]] = row["step"]
        return apart

    def parted_layers(self) -> Table:
        """Return where each layer parts: a row for each run and layer, with the first step at which it is apart from
        the first run's, null where it never is, and its last known distance; those that part first come first."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for row in sorted(self.layers, key=lambda row: row["step"]):
            found = rows.setdefault((row["run"], row["layer"]), {**row, "step": None, "distance": None})
            if row["distance"] is not None:
                found["distance"] = row["distance"]
            if row["distance"] and found["step"] is None:
                found["step"] = row["step"]
        ordered = sorted(rows.values(), key=lambda row: (row["step"] is None, row["step"], natural_order(row["layer"])))
        return Table(pa.Table.from_pylist(ordered, schema=_LAYERS))

    def figures(self) -> list[str]:
        """Return what `plot` can draw: the metrics that a run has, "loss" first, "distance" and "layers"."""
        names = {name for metrics in self.metrics.values() for name in metrics} - {"loss"}
        return ["loss", *sorted(names), "distance", "layers"]

    def picture(self) -> Picture:
        """Return what the figure of the layers shows: the distance of each, the layer that parts first on top."""
        steps = sorted(set(self.layers["step"].to_pylist()))
        known = {(row["run"], row["layer"], row["step"]): row["distance"] for row in self.layers}
        lines = [(row["run"], row["layer"]) for row in self.parted_layers()]
        values = [[known.get((*line, step)) for step in steps] for line in lines]
        return Picture(
            steps=steps,
            since=[None] * len(steps),
            lines=[layer if len(self.runs) == 2 else f"{run}: {layer}" for run, layer in lines],
            values=values,
            name="distance",
            scale=Scale(values),
        )

    def plot(self, figure: str = "loss") -> "go.Figure":
        """Draw a metric of every run, with "distance" how far each is from the first, or with "layers" the same for
        every layer. Needs the [notebook] extra. NotFoundError, with the nearest, for a metric that no run has."""
        from dshistory.display import plot

        if figure not in self.figures():
            raise NotFoundError(f"plot: no figure {figure!r}; {nearest(figure, self.figures())}")
        if figure == "layers":
            return plot.layers_by_step(self.picture())
        if figure == "distance":
            rows = {run: [r for r in self if r["run"] == run and r["distance"] is not None] for run in self.runs[1:]}
            lines = {run: ([r["step"] for r in of], [r["distance"] for r in of]) for run, of in rows.items()}
        else:
            by_run = {run: metrics.get(figure, {}) for run, metrics in self.metrics.items()}
            lines = {run: (list(values), list(values.values())) for run, values in by_run.items() if values}
        return plot.runs_by_step(lines, value=figure)


def compare(
    history: History, runs: Sequence[str], *, names: Patterns, kinds: Patterns, exact: bool, quiet: bool
) -> ComparedRuns:
    """See `Explorer.compare`."""
    if len(runs) < 2 or len(set(runs)) < len(runs):
        raise SetupError(f"compare: {', '.join(runs) or 'nothing'}: give two or more runs, each once")
    chains = {run: {ref.step: ref for ref in lineage(history.paths, run)} for run in runs}
    metrics = {run: lineage_metrics(history.paths, run) for run in runs}
    losses = {run: of_run.get("loss", {}) for run, of_run in metrics.items()}
    first, others = runs[0], runs[1:]
    pairs = [
        (run, step, chains[first][step], ref)
        for run in others
        for step, ref in chains[run].items()
        if step in chains[first]
    ]
    distances: dict[tuple[str, int], dict[str, tuple[float, float | None]]] = {}
    with CountProgress(len(pairs), description="compare", quiet=quiet, unit="step") as bar:
        for run, step, before, after in pairs:
            distances[run, step] = _by_layer(history, before, after, names=names, kinds=kinds, exact=exact)
            bar.advance(1)
    rows = [
        _row(run, step, losses, first, distances.get((run, step)))
        for run in others
        for step in sorted({*losses[run], *(step for one, step in distances if one == run)})
    ]
    layers = [
        {"run": run, "layer": layer, "step": step, "distance": _relative(*figures)}
        for (run, step), by_layer in distances.items()
        for layer, figures in by_layer.items()
    ]
    table = ComparedRuns(pa.Table.from_pylist(sorted(rows, key=lambda row: row["step"]), schema=_SCHEMA))
    table.runs, table.metrics = runs, metrics
    table.layers = Table(pa.Table.from_pylist(layers, schema=_LAYERS))
    table.note = "; ".join(
        f"{run} is equal to {first} in all that both have"
        if step is None
        else f"{run} parts from {first} at step {step}"
        for run, step in table.parted().items()
    )
    return table


def _by_layer(
    history: History, before: CheckpointRef, after: CheckpointRef, *, names: Patterns, kinds: Patterns, exact: bool
) -> dict[str, tuple[float, float | None]]:
    """Return the norm of the difference and the norm before of every layer that both have."""
    if before == after:
        return {}
    rows = diff(history, before, after, kinds=kinds, names=names, by="layer", exact=exact, quiet=True)
    return {row["name"]: (row["update_norm"], row["norm_before"]) for row in rows if row["update_norm"] is not None}


def _row(
    run: str,
    step: int,
    losses: Mapping[str, Mapping[int, float]],
    first: str,
    by_layer: Mapping[str, tuple[float, float | None]] | None,
) -> dict[str, Any]:
    loss, other = losses[run].get(step), losses[first].get(step)
    moved = {layer: _relative(*figures) for layer, figures in (by_layer or {}).items()}
    furthest = max(moved, key=lambda layer: moved[layer] or 0.0, default=None)
    return {
        "step": step,
        "run": run,
        "loss": loss,
        "loss_difference": None if loss is None or other is None else loss - other,
        "distance": None if by_layer is None else _in_all(by_layer),
        "furthest_layer": furthest if furthest is not None and moved[furthest] else None,
    }


def _in_all(by_layer: Mapping[str, tuple[float, float | None]]) -> float | None:
    """Return the distance over all layers; unknown where the norm of one is."""
    norms = [norm for _, norm in by_layer.values() if norm is not None]
    norm = math.hypot(*norms) if len(norms) == len(by_layer) else None
    return _relative(math.hypot(*(difference for difference, _ in by_layer.values())), norm)


def _relative(difference: float, norm: float | None) -> float | None:
    if not difference:
        return 0.0
    return difference / norm if norm else math.inf if norm == 0 else None
