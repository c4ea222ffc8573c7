"""A cache of the statistics of all tensors at all analyzed checkpoints of a lineage, one for each open history.

Published statistics never change, so the next call asks the catalog for the new checkpoints alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from catalog.history import History
from catalog.index.index import Asking
from catalog.records import CheckpointRef
from dshistory.metrics import Floats
from dshistory.trends.statistics_matrix import Key, Known, StatisticsMatrix, analyzed

__all__ = ["CachedStatistics", "Parts", "cached_statistics"]

Parts = Callable[[Sequence[Key]], Sequence[str]]
"""Chooses the parts to ask for, by the keys of the tensors that there are."""


@dataclass(frozen=True, slots=True)
class CachedStatistics:
    """The matrix (tensors, checkpoints) of each part over `refs`, all of which have statistics; NaN where it is
    unknown.

    `known` is false where a tensor has no statistics in a checkpoint."""

    refs: Sequence[CheckpointRef]
    keys: Sequence[Key]
    known: Known
    parts: dict[str, Floats]

    def begins(self, refs: Sequence[CheckpointRef]) -> bool:
        """Return whether these are the statistics of the first of `refs`."""
        return self.refs == refs[: len(self.refs)]

    def followed_by(self, more: "CachedStatistics") -> "CachedStatistics | None":
        """Return both, one after the other; None where they have other tensors or parts."""
        if self.keys != more.keys or self.parts.keys() != more.parts.keys():
            return None
        return CachedStatistics(
            [*self.refs, *more.refs],
            self.keys,
            _appended(self.known, more.known),
            {name: _appended(part, more.parts[name]) for name, part in self.parts.items()},
        )


_kept: Final[WeakKeyDictionary[History, CachedStatistics]] = WeakKeyDictionary()
"""Open history -> the result of its last call."""


def cached_statistics(history: History, refs: Sequence[CheckpointRef], parts: Parts) -> CachedStatistics:
    """Return the statistics of those of `refs`, a lineage, that have some."""
    with history.asking() as ask:
        wanted = analyzed(ask, refs)
        kept = _kept.get(history)
        found = None
        if kept is not None and kept.begins(wanted):
            new = wanted[len(kept.refs) :]
            found = kept.followed_by(_queried(history, ask, new, parts)) if new else kept
        if found is None:
            found = _queried(history, ask, wanted, parts)
    _kept[history] = found
    return found


def _queried(history: History, ask: Asking, refs: Sequence[CheckpointRef], parts: Parts) -> CachedStatistics:
    if not refs:
        return CachedStatistics([], [], np.zeros((0, 0), np.bool_), {})
    matrix = StatisticsMatrix.all(history, ask, refs)
    known, values = matrix.statistics(parts(matrix.keys))
    return CachedStatistics(refs, matrix.keys, known, dict(values))


def _appended(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Append checkpoints; both matrices are Fortran-ordered, so their transposes join without a copy of each row."""
    return np.concatenate([before.T, after.T]).T
