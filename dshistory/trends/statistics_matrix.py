"""Matrices of tensors x checkpoints of a lineage, from the catalog: their statistics, and what is stored.

A cell is one tensor at one checkpoint. Only the catalog is read, never a tensor; each method is one query, and all
queries of a matrix see the same state of the history.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.history import History
from catalog.index.index import Asking
from catalog.records import CheckpointRef
from dshistory.display.formats import counted
from dshistory.metrics import Floats
from dshistory.patterns import Patterns, matching

__all__ = ["Key", "Known", "StatisticsMatrix", "Stored", "analyzed"]

_PARTS: Final[Mapping[str, str]] = {
    "squares": "CASE WHEN finite > 0 OR numel = 0 THEN sum_of_squares END",
    "sum": "sum",
    "finite": "finite",
    "numel": "numel",
    "nan": "nan",
    "inf": "inf",
    "nonfinite": "nan + inf",
    "zeros": "zeros",
    "least": "coalesce(min, 'inf')",
    "most": "coalesce(max, '-inf')",
    "update_squares": "update_norm * update_norm",
    "before_squares": "norm_before * norm_before",
    "dot": "cosine * norm_before * norm",
    "largest": "greatest(abs(min), abs(max))",
    "zeros_share": "CASE WHEN numel > 1 THEN zeros / numel END",
}
"""Part of a figure -> the SQL for it over a row of the view `statistics`.

The names of `dshistory.metrics` and the formulas are its inverses: `update_squares` is the square of the update norm.
The last two are for anomalies alone: figures of one tensor at a time, which the database computes in less memory than
matrices of their parts take. tests/dshistory/test_metrics_sql.py holds all of them to `dshistory.metrics`."""

_BELOW_ROUNDING: Final = "coalesce(update_norm <= 1e-12 * (norm_before + norm), true)"
"""True for an update that is not larger than the rounding of the float64 sums that a sketch consists of."""

Key = tuple[str, str]
Places = npt.NDArray[np.int64]
Known = npt.NDArray[np.bool_]


class Stored:
    """Matrices of what the manifests say about each cell.

    `there` is true where the checkpoint has the tensor, `follows` where the checkpoint before has it too, with the same
    shape, and `same` where the two are equal bit for bit. `numel` and `nbytes` are its elements and bytes, 0 where it
    is not there."""

    def __init__(self, there: Known, numel: Places, nbytes: Places, form: Places, content: Places) -> None:
        """Cells of equal `form` have equal shapes, and cells of equal `content` have equal dtypes and bytes."""
        self.there = there
        self.numel = numel
        self.nbytes = nbytes
        self.follows = np.zeros_like(there)
        self.follows[:, 1:] = there[:, 1:] & there[:, :-1] & (form[:, 1:] == form[:, :-1])
        self.same = self.follows.copy()
        self.same[:, 1:] &= content[:, 1:] == content[:, :-1]


class StatisticsMatrix:
    """The selected tensors `keys`, in order of kind and name, x the checkpoints `refs`, whose steps ascend."""

    def __init__(self, history: History, ask: Asking, refs: Sequence[CheckpointRef], keys: Sequence[Key]) -> None:
        self.history = history
        self.refs = refs
        self.keys = keys
        self._ask = ask
        self._lineage = _Lineage(refs)

    @classmethod
    @contextmanager
    def chosen(
        cls, history: History, refs: Sequence[CheckpointRef], *, kinds: Patterns, names: Patterns
    ) -> Iterator[Self]:
        """Open the matrix of the tensors whose kind and name (or alias) match; it answers queries within the `with`
        block.

        Raises NotFoundError, which names the nearest, for a pattern that matches none."""
        with history.asking() as ask:
            yield cls(history, ask, refs, _matching(ask, refs, kinds=kinds, names=names))

    @classmethod
    def all(cls, history: History, ask: Asking, refs: Sequence[CheckpointRef]) -> Self:
        """Return the matrix of all tensors, which queries through the caller's `ask`."""
        return cls(history, ask, refs, _matching(ask, refs, kinds="*", names="*"))

    def statistics(self, parts: Sequence[str]) -> tuple[Known, Mapping[str, Floats]]:
        """Return which cells have statistics, and the matrix of each part, NaN where it is unknown."""
        rows = self._rows("statistics", _columns(parts))
        return rows.matrix(True), {part: rows.matrix(rows[part], missing=np.nan) for part in parts}

    def updates(self, parts: Sequence[str]) -> tuple[Mapping[str, Floats], list[int]]:
        """Return the matrix of each part of a figure about the way from the checkpoint right before, estimated from
        sketches; NaN where it is unknown or below their rounding.

        Also returns the places of checkpoints whose statistics count from a checkpoint outside the lineage: one after a
        fork, or one that was removed since. Those must be estimated from the sketches of the two checkpoints
        instead."""
        rows = self._rows("statistics", f"c.since, {_columns(parts)}, {_BELOW_ROUNDING} AS below_rounding")
        steps = np.nan_to_num(rows["since"], nan=-1).astype(np.int64)
        since, in_lineage = self._lineage.places(steps, rows.run)
        # The catalog counts from the last *analyzed* checkpoint: with a gap between, that is another update than asked
        # for.
        usable = in_lineage & (since == rows.place - 1) & ~rows["below_rounding"]
        elsewhere = np.unique(rows.place[~in_lineage & (rows.place > 0)]).tolist()
        return {part: rows.matrix(np.where(usable, rows[part], np.nan), missing=np.nan) for part in parts}, elsewhere

    def stored(self) -> Stored:
        """Return what the manifests say about each cell."""
        rows = self._rows("tensors", "c.numel, c.nbytes, hash(c.shape) AS form, hash(c.dtype, c.hash) AS content")
        return Stored(rows.matrix(True), *(rows.matrix(rows[name]) for name in ("numel", "nbytes", "form", "content")))

    def _rows(self, table: str, columns: str) -> "_Rows":
        chosen = {"kinds": [kind for kind, _ in self.keys], "names": [name for _, name in self.keys]}
        sql = f"""
        SELECT c.step, {self._lineage.number} AS run, w.tensor, {columns} FROM {table} c
        JOIN (SELECT unnest($kinds) AS kind, unnest($names) AS name, unnest(range(len($names))) AS tensor) w
        ON w.kind = c.kind AND w.name = c.name WHERE {self._lineage.condition}
        """
        return _Rows(self._ask(sql, self._lineage.params | chosen), self._lineage, (len(self.keys), len(self.refs)))


def analyzed(ask: Asking, refs: Sequence[CheckpointRef]) -> list[CheckpointRef]:
    """Return those checkpoints of a lineage that have statistics, in order."""
    lineage = _Lineage(refs)
    rows = ask(f"SELECT c.run, c.step FROM statistics c WHERE {lineage.condition} GROUP BY ALL", lineage.params)
    there = set(zip(rows["run"].to_pylist(), rows["step"].to_pylist(), strict=True))
    return [ref for ref in refs if (ref.run, ref.step) in there]


class _Lineage:
    """A lineage in SQL: a few runs, each from one step to another; and the place of a step among its checkpoints."""

    def __init__(self, refs: Sequence[CheckpointRef]) -> None:
        lasts = {ref.run: ref.step for ref in refs}
        firsts = {ref.run: ref.step for ref in reversed(refs)}
        runs = list(lasts)
        self._steps = np.array([ref.step for ref in refs])
        self._runs = np.array([runs.index(ref.run) for ref in refs])
        self.params: dict[str, Any] = {}
        for i, (run, last) in enumerate(lasts.items()):
            self.params |= {f"run{i}": run, f"first{i}": firsts[run], f"last{i}": last}
        each = range(len(runs))
        self.condition = f"({' OR '.join(f'c.run = $run{i} AND c.step BETWEEN $first{i} AND $last{i}' for i in each)})"
        self.number = f"CASE c.run {' '.join(f'WHEN $run{i} THEN {i}' for i in each)} END" if len(runs) > 1 else "0"

    def places(self, steps: Places, runs: Places) -> tuple[Places, Known]:
        """Return the place of each step, and whether the lineage has that step in that run.

        Rows come in long series of equal steps, so each series is looked up once."""
        if not len(steps):
            return steps, np.zeros(0, np.bool_)
        heads = np.flatnonzero(np.concatenate([[True], (steps[1:] != steps[:-1]) | (runs[1:] != runs[:-1])]))
        counts = np.diff(np.append(heads, len(steps)))
        place = np.minimum(np.searchsorted(self._steps, steps[heads]), len(self._steps) - 1)
        found = (self._steps[place] == steps[heads]) & (self._runs[place] == runs[heads])
        return np.repeat(place, counts), np.repeat(found, counts)


class _Rows:
    """The rows of a query, one for each cell, with the `run` (by its number) and the `place` of its checkpoint."""

    def __init__(self, rows: pa.Table, lineage: _Lineage, shape: tuple[int, int]) -> None:
        place, in_lineage = lineage.places(rows["step"].to_numpy(), rows["run"].to_numpy())
        if not in_lineage.all():
            rows, place = rows.filter(pa.array(in_lineage)), place[in_lineage]
        self._table = rows
        self._shape = shape
        self.place = place
        self.run = rows["run"].to_numpy()
        self._at = place * shape[0] + rows["tensor"].to_numpy()

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._table[column].to_numpy()
        return values

    def matrix(self, values: npt.NDArray[Any] | bool, *, missing: float = 0) -> npt.NDArray[Any]:
        """Return values of the rows as (tensors, checkpoints), `missing` where no row is.

        In memory it is Fortran-ordered, one checkpoint after the other as the rows come: that is several times
        faster."""
        count, places = self._shape
        kind = np.asarray(values).dtype
        whole = len(self._at) == count * places
        flat = np.empty(count * places, kind) if whole else np.full(count * places, missing, kind)
        flat[self._at] = values
        return flat.reshape(places, count).T


def _columns(parts: Sequence[str]) -> str:
    return ", ".join(f'({_PARTS[part]})::DOUBLE AS "{part}"' for part in parts)


def _matching(ask: Asking, refs: Sequence[CheckpointRef], *, kinds: Patterns, names: Patterns) -> list[Key]:
    where = f"{refs[0]} to {refs[-1]} ({counted(len(refs), 'checkpoint')})"
    lineage = _Lineage(refs)
    rows = ask(f"SELECT DISTINCT c.kind, c.name FROM tensors c WHERE {lineage.condition}", lineage.params)
    of_key = {
        (kind, name): {name} for kind, name in zip(rows["kind"].to_pylist(), rows["name"].to_pylist(), strict=True)
    }
    patterns = [names] if isinstance(names, str) else names
    if not {"*", *(name for _, name in of_key)}.issuperset(patterns):
        sql = (
            "SELECT DISTINCT c.kind, c.name, c.aliases FROM fragments c "
            f"WHERE {lineage.condition} AND len(c.aliases) > 0"
        )
        for row in ask(sql, lineage.params).to_pylist():
            of_key.get((row["kind"], row["name"]), set()).update(row["aliases"])
    wanted_kinds = matching({kind for kind, _ in of_key}, kinds, what="kind", where=where)
    known = {name for (kind, _), also in of_key.items() if kind in wanted_kinds for name in also}
    wanted = matching(known, names, what="tensor", where=where)
    return sorted(key for key, also in of_key.items() if key[0] in wanted_kinds and not wanted.isdisjoint(also))
