"""Tensors x checkpoints of a lineage, as matrices from the catalog: what the statistics say, and what is stored.

A cell is of one tensor at one checkpoint. Nothing is read but the catalog, each question is one query, and all are about the
same moment.
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

__all__ = ["Cells", "Key", "Known", "Stored", "analyzed"]

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
    "relative_update": "relative_update",
}
"""Part of a number -> what it is of a row of statistics."""

_DROWNED: Final = "coalesce(update_norm <= 1e-12 * (norm_before + norm), true)"
"""Sums of float64 are no better."""

Key = tuple[str, str]
Places = npt.NDArray[np.int64]
Known = npt.NDArray[np.bool_]


class Stored:
    """What the manifests say of each cell: whether the tensor is `there`, how many elements and bytes it has, whether it `follows`
    one of its shape in the checkpoint before, and whether that is the `same` bit for bit."""

    def __init__(self, there: Known, numel: Places, nbytes: Places, form: Places, content: Places) -> None:
        """`form` is equal where shapes are, `content` where dtype and bytes are."""
        self.there = there
        self.numel = numel
        self.nbytes = nbytes
        self.follows = np.zeros_like(there)
        self.follows[:, 1:] = there[:, 1:] & there[:, :-1] & (form[:, 1:] == form[:, :-1])
        self.same = self.follows.copy()
        self.same[:, 1:] &= content[:, 1:] == content[:, :-1]


class Cells:
    """The cells of tensors chosen, in order of kind and name, over `refs`, whose steps ascend."""

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
        """Those of the tensors that fit, by their name or an alias; the body asks its questions. NotFoundError, naming the
        nearest, for a pattern that fits none."""
        with history.asking() as ask:
            yield cls(history, ask, refs, _matching(ask, refs, kinds=kinds, names=names))

    @classmethod
    def all(cls, history: History, ask: Asking, refs: Sequence[CheckpointRef]) -> Self:
        """Those of all tensors, within the caller's moment."""
        return cls(history, ask, refs, _matching(ask, refs, kinds="*", names="*"))

    def statistics(self, parts: Sequence[str]) -> tuple[Known, Mapping[str, Floats]]:
        """Which cells have statistics, and for each part its (tensors, checkpoints), NaN where it is unknown."""
        rows = self._rows("statistics", _columns(parts))
        return rows.matrix(True), {part: rows.matrix(rows[part], missing=np.nan) for part in parts}

    def moves(self, parts: Sequence[str]) -> tuple[Mapping[str, Floats], list[int]]:
        """For each part its (tensors, checkpoints), of the way from the checkpoint right before, from sketches; NaN where it is
        unknown, or smaller than their rounding. And the places whose statistics count from a checkpoint that is not in the
        lineage: before a fork, or since removed."""
        rows = self._rows("statistics", f"c.since, {_columns(parts)}, {_DROWNED} AS drowned")
        steps = np.nan_to_num(rows["since"], nan=-1).astype(np.int64)
        since, right = self._lineage.places(steps, rows.run)
        told = right & (since == rows.place - 1) & ~rows["drowned"]
        elsewhere = np.unique(rows.place[~right & (rows.place > 0)]).tolist()
        return {part: rows.matrix(np.where(told, rows[part], np.nan), missing=np.nan) for part in parts}, elsewhere

    def stored(self) -> Stored:
        """What is stored."""
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
    """Those of a lineage that have statistics, in order."""
    lineage = _Lineage(refs)
    rows = ask(f"SELECT c.run, c.step FROM statistics c WHERE {lineage.condition} GROUP BY ALL", lineage.params)
    there = set(zip(rows["run"].to_pylist(), rows["step"].to_pylist(), strict=True))
    return [ref for ref in refs if (ref.run, ref.step) in there]


class _Lineage:
    """Which rows are of a lineage, in SQL: of a few runs, from one step to another each. And the places of steps in it."""

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
        """The places of steps, and whether it is really there, in that run. Rows come in long series of one step: each is
        looked up once."""
        if not len(steps):
            return steps, np.zeros(0, np.bool_)
        heads = np.flatnonzero(np.concatenate([[True], (steps[1:] != steps[:-1]) | (runs[1:] != runs[:-1])]))
        counts = np.diff(np.append(heads, len(steps)))
        place = np.minimum(np.searchsorted(self._steps, steps[heads]), len(self._steps) - 1)
        right = (self._steps[place] == steps[heads]) & (self._runs[place] == runs[heads])
        return np.repeat(place, counts), np.repeat(right, counts)


class _Rows:
    """Rows of cells, each with its `run` (by number) and `place`."""

    def __init__(self, rows: pa.Table, lineage: _Lineage, shape: tuple[int, int]) -> None:
        place, right = lineage.places(rows["step"].to_numpy(), rows["run"].to_numpy())
        if not right.all():
            rows, place = rows.filter(pa.array(right)), place[right]
        self._table = rows
        self._shape = shape
        self.place = place
        self.run = rows["run"].to_numpy()
        self._at = place * shape[0] + rows["tensor"].to_numpy()

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self._table[column].to_numpy()
        return values

    def matrix(self, values: npt.NDArray[Any] | bool, *, missing: float = 0) -> npt.NDArray[Any]:
        """(tensors, checkpoints). In memory one checkpoint after the other, as rows come, which is several times faster."""
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
        sql = f"SELECT DISTINCT c.kind, c.name, c.aliases FROM fragments c WHERE {lineage.condition} AND len(c.aliases) > 0"
        for row in ask(sql, lineage.params).to_pylist():
            of_key.get((row["kind"], row["name"]), set()).update(row["aliases"])
    wanted_kinds = matching({kind for kind, _ in of_key}, kinds, what="kind", where=where)
    known = {name for (kind, _), also in of_key.items() if kind in wanted_kinds for name in also}
    wanted = matching(known, names, what="tensor", where=where)
    return sorted(key for key, also in of_key.items() if key[0] in wanted_kinds and not wanted.isdisjoint(also))
