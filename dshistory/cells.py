"""Tensors x checkpoints of a lineage, as matrices from the catalog: what the statistics say, and what is stored.

A cell is of one tensor at one checkpoint. Nothing is read but the catalog, and each question is one query.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.metrics import Floats
from dshistory.naming import Patterns, matching

__all__ = ["Cells", "Key", "Known", "Stored"]

_CHOSEN: Final = """
    JOIN (SELECT unnest($runs) AS run, unnest(range(len($runs))) AS at, unnest($lasts) AS last) r ON r.run = c.run AND c.step <= r.last
    JOIN (SELECT unnest($kinds) AS kind, unnest($names) AS name, unnest(range(len($names))) AS tensor) w
    ON w.kind = c.kind AND w.name = c.name
"""
_TENSORS: Final = """
SELECT DISTINCT c.kind, c.name, [] AS aliases FROM tensors c
JOIN (SELECT unnest($runs) AS run, unnest($lasts) AS last) r ON r.run = c.run AND c.step <= r.last
UNION ALL
SELECT DISTINCT kind, name, aliases FROM fragments WHERE list_contains($runs, run) AND len(aliases) > 0
"""
_PARTS: Final[Mapping[str, str]] = {
    "squares": "sum_of_squares",
    "sum": "sum",
    "finite": "finite",
    "numel": "numel",
    "nan": "nan",
    "inf": "inf",
    "nonfinite": "nan + inf",
    "zeros": "zeros",
    "least": "min",
    "most": "max",
    "largest": "greatest(abs(min), abs(max))",
    "zeros_share": "zeros / nullif(numel, 0)",
    "relative_update": "relative_update",
    "update_squares": "update_norm * update_norm",
    "before_squares": "norm_before * norm_before",
    "dot": "cosine * norm_before * norm",
}
"""Part of a metric -> what it is of a row of statistics."""

_DROWNED: Final = "coalesce(update_norm <= 1e-12 * (norm_before + norm), true)"
"""Sums of float64 are no better."""

Key = tuple[str, str]
Places = npt.NDArray[np.int64]
Known = npt.NDArray[np.bool_]


class Stored:
    """What the manifests say of each cell: whether the tensor is `there`, its bytes, and numbers that are equal where its shape
    is (`form`), and where dtype and bytes are (`content`)."""

    def __init__(
        self, there: Known, numel: Places, nbytes: Places, form: npt.NDArray[np.uint64], content: npt.NDArray[np.uint64]
    ) -> None:
        self.there = there
        self.numel = numel
        self.nbytes = nbytes
        both = there[:, 1:] & there[:, :-1]
        none = np.zeros((len(there), 1), np.bool_)
        of_one_form = both & (form[:, 1:] == form[:, :-1])
        self.follows = np.hstack([none, of_one_form])
        """Whether it was there in the checkpoint before, in the same shape."""
        self.same = np.hstack([none, of_one_form & (content[:, 1:] == content[:, :-1])])
        """Whether it was there bit for bit."""


class Cells:
    """The cells of the tensors chosen, in order of kind and name, over `refs`, whose steps ascend."""

    def __init__(self, history: History, refs: Sequence[CheckpointRef], *, kinds: Patterns, names: Patterns) -> None:
        self.history = history
        self.refs = refs
        self._steps = np.array([ref.step for ref in refs])
        lasts = {ref.run: ref.step for ref in refs}
        self._runs = list(lasts)
        self._run_of_place = np.array([self._runs.index(ref.run) for ref in refs])
        self._lineage = {"runs": self._runs, "lasts": list(lasts.values())}
        self.keys = self._matching(kinds, names)

    def statistics(self, parts: Sequence[str]) -> tuple[Known, Mapping[str, Floats]]:
        """Which cells have statistics, and for each part its (tensors, checkpoints), NaN where it is unknown."""
        rows, at = self._query(f"SELECT c.step, r.at, w.tensor, {_columns(parts)} FROM statistics c {_CHOSEN}")
        known = self._matrix(at, np.ones(len(at[0]), np.bool_))
        return known, {part: self._matrix(at, rows[part].to_numpy(), missing=np.nan) for part in parts}

    def moves(self, parts: Sequence[str]) -> tuple[Mapping[str, Floats], list[int]]:
        """For each part its (tensors, checkpoints), of the way from the checkpoint right before, from sketches; NaN where it is
        unknown, or smaller than their rounding. And the places whose statistics count from a checkpoint that is not in the
        lineage: before a fork, or since removed."""
        rows, at = self._query(
            f"SELECT c.step, r.at, w.tensor, c.since, {_columns(parts)}, {_DROWNED} AS drowned FROM statistics c {_CHOSEN}"
        )
        steps = np.nan_to_num(rows["since"].to_numpy(), nan=-1).astype(np.int64)
        since, right = self._places(steps, self._run_of_place[at[1]])
        told = right & (since == at[1] - 1) & ~rows["drowned"].to_numpy()
        values = {part: np.where(told, rows[part].to_numpy(), np.nan) for part in parts}
        elsewhere = np.unique(at[1][~right & (at[1] > 0)]).tolist()
        return {part: self._matrix(at, cells, missing=np.nan) for part, cells in values.items()}, elsewhere

    def stored(self) -> Stored:
        """What is stored."""
        rows, at = self._query(
            "SELECT c.step, r.at, w.tensor, c.numel, c.nbytes, hash(c.shape) AS form, hash(c.dtype, c.hash) AS content FROM tensors c "
            + _CHOSEN
        )
        there = self._matrix(at, np.ones(len(at[0]), np.bool_))
        return Stored(
            there, *(self._matrix(at, rows[name].to_numpy()) for name in ("numel", "nbytes", "form", "content"))
        )

    def _query(self, sql: str) -> tuple[pa.Table, tuple[Places, Places]]:
        """The rows that are of the lineage, and for each its tensor and place."""
        chosen = {"kinds": [kind for kind, _ in self.keys], "names": [name for _, name in self.keys]}
        rows = self.history.query(sql, self._lineage | chosen)
        place, right = self._places(rows["step"].to_numpy(), rows["at"].to_numpy())
        if not right.all():
            rows, place = rows.filter(pa.array(right)), place[right]
        return rows, (rows["tensor"].to_numpy(), place)

    def _places(self, steps: Places, runs: Places) -> tuple[Places, Known]:
        """The places of steps, and whether it is really there, in that run."""
        place = np.minimum(np.searchsorted(self._steps, steps), len(self._steps) - 1)
        return place, (self._steps[place] == steps) & (self._run_of_place[place] == runs)

    def _matrix(self, at: tuple[Places, Places], values: npt.NDArray[Any], *, missing: float = 0) -> npt.NDArray[Any]:
        # Rows come step by step: to write them where they lie side by side is several times faster.
        matrix = np.full((len(self.keys), len(self.refs)), missing, values.dtype, order="F")
        matrix[at] = values
        return matrix

    def _matching(self, kinds: Patterns, names: Patterns) -> list[Key]:
        """The (kind, name) that fit by their name or an alias; every pattern must fit something."""
        where = f"{self.refs[0]} to {self.refs[-1]}"
        rows = self.history.query(_TENSORS, self._lineage)
        of_key: dict[Key, set[str]] = {}
        for kind, name, aliases in zip(
            *(rows[field].to_pylist() for field in ("kind", "name", "aliases")), strict=True
        ):
            of_key.setdefault((kind, name), {name}).update(aliases)
        wanted_kinds = matching({kind for kind, _ in of_key}, kinds, what="kind", where=where)
        known = {name for (kind, _), also in of_key.items() if kind in wanted_kinds for name in also}
        wanted = matching(known, names, what="tensor", where=where)
        return sorted(key for key, also in of_key.items() if key[0] in wanted_kinds and not wanted.isdisjoint(also))


def _columns(parts: Sequence[str]) -> str:
    return ", ".join(f'({_PARTS[part]})::DOUBLE AS "{part}"' for part in parts)
