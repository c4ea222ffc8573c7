"""The statistics of all tensors at all analyzed checkpoints of a lineage, as matrices that are kept for the next question.

Published statistics never change, so the next question asks the catalog for the new checkpoints alone.
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
from dshistory.trends.statistics_matrix import Cells, Key, Known, analyzed

__all__ = ["Figures", "Parts", "figures"]

Parts = Callable[[Sequence[Key]], Sequence[str]]
"""What to know of tensors of these keys."""


@dataclass(frozen=True, slots=True)
class Figures:
    """(tensors, checkpoints) of each part, of `refs` that have statistics; NaN where it is unknown, and `known` false where the tensor
    has no statistics."""

    refs: Sequence[CheckpointRef]
    keys: Sequence[Key]
    known: Known
    parts: dict[str, Floats]

    def begins(self, refs: Sequence[CheckpointRef]) -> bool:
        """Whether these are of the first of `refs`."""
        return self.refs == refs[: len(self.refs)]

    def and_then(self, more: "Figures") -> "Figures | None":
        """Both one after the other; None where they are not of the same tensors and parts."""
        if self.keys != more.keys or self.parts.keys() != more.parts.keys():
            return None
        return Figures(
            [*self.refs, *more.refs],
            self.keys,
            _joined(self.known, more.known),
            {name: _joined(part, more.parts[name]) for name, part in self.parts.items()},
        )


_kept: Final[WeakKeyDictionary[History, Figures]] = WeakKeyDictionary()
"""Of each open history what was asked for last."""


def figures(history: History, refs: Sequence[CheckpointRef], parts: Parts) -> Figures:
    """Those of `refs`, a lineage, that have statistics."""
    with history.asking() as ask:
        wanted = analyzed(ask, refs)
        kept = _kept.get(history)
        found = None
        if kept is not None and kept.begins(wanted):
            new = wanted[len(kept.refs) :]
            found = kept.and_then(_asked(history, ask, new, parts)) if new else kept
        if found is None:
            found = _asked(history, ask, wanted, parts)
    _kept[history] = found
    return found


def _asked(history: History, ask: Asking, refs: Sequence[CheckpointRef], parts: Parts) -> Figures:
    if not refs:
        return Figures([], [], np.zeros((0, 0), np.bool_), {})
    cells = Cells.all(history, ask, refs)
    known, values = cells.statistics(parts(cells.keys))
    return Figures(refs, cells.keys, known, dict(values))


def _joined(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """In memory one checkpoint after the other, as they are."""
    return np.concatenate([before.T, after.T]).T
