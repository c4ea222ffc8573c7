"""The distances between all checkpoints of a run, estimated from sketches, and the path that they make in the plane.

Sketches are linear, so the distance of two checkpoints is that of their sketches. The inner products of all pairs are
one matrix product for each tensor (a Gram matrix G), from which |a - b|^2 = G_aa + G_bb - 2 G_ab.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from catalog.statistics.compute import BUCKETS
from dshistory.comparison.sketch_estimates import norm_bound
from dshistory.display.formats import counted
from dshistory.display.table import Table
from dshistory.patterns import Patterns, matching

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["DistanceTable", "PathTable", "plane", "step_distances"]

_TENSORS_AT_ONCE: Final = 64
"""The sketches of so many tensors are in memory at a time."""

_ALWAYS_FLAT: Final = 3
"""So few points lie in a plane whatever their distances are."""

Matrix = npt.NDArray[np.float64]


class PathTable(Table):
    """A row for each checkpoint, with its place `x`, `y` in the plane, in units of distance."""

    def plot(self) -> "go.Figure":
        """Draw the path, coloured by step. Needs the [notebook] extra."""
        from dshistory.display import plot

        return plot.path_in_plane(self)


class DistanceTable(Table):
    """A row for each pair of checkpoints, the earlier one first, with the estimated norm of the difference of all
    selected tensors."""

    refs: Sequence[CheckpointRef]
    squares: Matrix
    """The squared distances (checkpoints, checkpoints), in the order of `refs`."""

    def path(self) -> "PathTable":
        """Return each checkpoint as a point in the plane that keeps the distances best (classical scaling, see
        `plane`).

        The note gives the share of the variance that the plane has, and the share it would have for a random walk with
        steps of the same lengths: that looks smooth in the plane too (Antognini and Sohl-Dickstein, arXiv:1806.08805),
        so a path that shows no more than that shows nothing.
        """
        points, share = plane(self.squares)
        steps = np.array([self.squares[i, i + 1] for i in range(len(self.refs) - 1)])
        ends = np.concatenate([[0.0], np.cumsum(steps)])
        # The squared distances of a random walk add up along the way: its steps are orthogonal in high dimensions.
        _, walk_share = plane(np.abs(ends[:, None] - ends[None, :]))
        table = pa.table(
            {
                "run": pa.array([ref.run for ref in self.refs], pa.string()),
                "step": pa.array([ref.step for ref in self.refs], pa.int64()),
                "x": points[:, 0],
                "y": points[:, 1],
            }
        )
        note = (
            f"the plane has {share:.0%} of the variance; "
            f"of a random walk with the same steps it would have {walk_share:.0%}"
        )
        if len(self.refs) <= _ALWAYS_FLAT:
            note = f"{counted(len(self.refs), 'point')}: any so few lie in a plane, which says nothing"
        return PathTable(table, note=note)

    def plot(self) -> "go.Figure":
        """Draw the distances as a heat map, step by step. Needs the [notebook] extra."""
        from dshistory.display import plot

        labels = [str(ref.step) for ref in self.refs]
        return plot.heat_map(np.sqrt(self.squares), x=labels, y=labels, value="distance")


def step_distances(history: History, *, run: str | None, names: Patterns, kinds: Patterns) -> DistanceTable:
    """See `Explorer.distances`."""
    run = run or history.current_run()
    path = committed_lineage(history.paths, run)
    place = {ref: i for i, ref in enumerate(path)}
    runs = sorted({ref.run for ref in path})
    keys = history.query(
        "SELECT kind, name, count(*) AS steps FROM sketches WHERE list_contains($runs, run) GROUP BY kind, name",
        {"runs": runs},
    )
    if not keys.num_rows:
        raise NotFoundError(f"no checkpoint of run {run} has sketches yet: `analyze` computes them")
    where = f"the sketches of run {run}"
    wanted_kinds = matching(set(keys["kind"].to_pylist()), kinds, what="kind", where=where)
    of_kind = keys.filter(pc.is_in(keys["kind"], pa.array(sorted(wanted_kinds))))
    wanted = sorted(matching(set(of_kind["name"].to_pylist()), names, what="tensor", where=where))
    sums = _Gram(path, place)
    for first in range(0, len(wanted), _TENSORS_AT_ONCE):
        sums.add(history, runs, wanted[first : first + _TENSORS_AT_ONCE], sorted(wanted_kinds))
    broken = {place[ref] for ref in _not_finite(history, runs, wanted, sorted(wanted_kinds)) & place.keys()}
    squares, seen = sums.squares(without=broken)
    missing = len(path) - len(seen) - len(broken)
    return _table([path[i] for i in seen], squares, tensors=len(sums.tensors), missing=missing, broken=len(broken))


def _not_finite(history: History, runs: list[str], names: list[str], kinds: list[str]) -> set[CheckpointRef]:
    """Return the checkpoints where one of these tensors has values that are not finite, which a sketch counts as 0."""
    rows = history.query(
        "SELECT DISTINCT run, step FROM statistics WHERE nan + inf > 0 AND list_contains($runs, run) "
        "AND list_contains($names, name) AND list_contains($kinds, kind)",
        {"runs": runs, "names": names, "kinds": kinds},
    )
    return {CheckpointRef(row["run"], row["step"]) for row in rows.to_pylist()}


def plane(squares: Matrix) -> tuple[Matrix, float]:
    """Return the points (n, 2) that keep the squared distances (n, n) best in a plane, and their share of the variance.

    Classical multidimensional scaling: Torgerson, "Multidimensional scaling: I. Theory and method", Psychometrika 17
    (1952). Double centring turns squared distances into inner products, whose two largest eigenvectors span the plane.
    Estimated distances need not be those of any points: negative eigenvalues are that error, and count as 0."""
    count = len(squares)
    if not count:
        return np.zeros((0, 2)), 1.0
    centred = squares - squares.mean(axis=0) - squares.mean(axis=1)[:, None] + squares.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    points = np.zeros((count, 2))
    dimensions = min(2, count)
    points[:, :dimensions] = vectors[:, :dimensions] * np.sqrt(values[:dimensions])
    total = values.sum()
    return points, float(values[:2].sum() / total) if total else 1.0


class _Gram:
    """The inner products of all pairs of checkpoints, estimated from sketches and summed over tensors."""

    def __init__(self, path: Sequence[CheckpointRef], place: dict[CheckpointRef, int]) -> None:
        self._place = place
        self._products = np.zeros((len(path), len(path)))
        self._counts = np.zeros(len(path), np.int64)
        self.tensors: set[tuple[str, str]] = set()

    def add(self, history: History, runs: list[str], names: list[str], kinds: list[str]) -> None:
        """Add the inner products of these tensors."""
        rows = history.query(
            "SELECT run, step, kind, name, sketch FROM sketches WHERE list_contains($runs, run) "
            "AND list_contains($names, name) AND list_contains($kinds, kind) ORDER BY kind, name",
            {"runs": runs, "names": names, "kinds": kinds},
        )
        columns = [rows[name].to_pylist() for name in ("run", "step", "kind", "name")]
        by_tensor: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for row, (run, step, kind, name) in enumerate(zip(*columns, strict=True)):
            at = self._place.get(CheckpointRef(run, step))
            if at is not None:
                by_tensor.setdefault((kind, name), []).append((row, at))
        for tensor, members in by_tensor.items():
            sketches = np.array(rows["sketch"].take([row for row, _ in members]).to_pylist(), dtype=np.float64)
            places = np.array([place for _, place in members])
            self._products[np.ix_(places, places)] += sketches @ sketches.T
            self._counts[places] += 1
            self.tensors.add(tensor)

    def squares(self, *, without: set[int]) -> tuple[Matrix, list[int]]:
        """Return the squared distances between the checkpoints that have the sketches of all tensors, and their
        places."""
        complete = np.flatnonzero(self._counts == len(self.tensors))
        seen = complete[~np.isin(complete, sorted(without))]
        products = self._products[np.ix_(seen, seen)]
        norms = np.diag(products)
        # Nearly equal checkpoints: rounding may leave the difference just below 0.
        squares = np.maximum(norms[:, None] + norms[None, :] - 2 * products, 0.0)
        np.fill_diagonal(squares, 0.0)
        return squares, seen.tolist()


def _table(refs: Sequence[CheckpointRef], squares: Matrix, *, tensors: int, missing: int, broken: int) -> DistanceTable:
    first, second = (index.tolist() for index in np.triu_indices(len(refs), k=1))
    rows = pa.table(
        {
            "run_a": pa.array([refs[i].run for i in first], pa.string()),
            "a": pa.array([refs[i].step for i in first], pa.int64()),
            "run_b": pa.array([refs[i].run for i in second], pa.string()),
            "b": pa.array([refs[i].step for i in second], pa.int64()),
            "distance": np.sqrt(squares[first, second]),
        }
    )
    note = f"estimated from the sketches of {counted(tensors, 'tensor')}, each within about {norm_bound(BUCKETS):.0%}"
    if broken:
        note += f"; left out: {counted(broken, 'checkpoint')} where some of them are not finite"
    if missing:
        note += (
            f"; left out: {counted(missing, 'checkpoint')} without statistics of all of them: "
            "`analyze` computes what is missing"
        )
    table = DistanceTable(rows, note=note)
    table.refs, table.squares = refs, squares
    return table
