"""Tells which losses are ordinary, by their median and their spread by medians, which one outlier does not move."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from catalog.history import History
from catalog.lineage_metrics import lineage_metrics
from catalog.records import CheckpointRef
from dshistory.metrics import AS_NORMAL

__all__ = ["Ordinary", "recorded_before"]

_LEAST_SPREAD: Final = 0.01
"""Below this share of the loss a spread is not believed: a handful of losses can agree by chance."""

_BEFORE: Final = 20
_FEWEST: Final = 5
"""So many losses before a step tell what is ordinary there, and fewer than this do not."""


@dataclass(frozen=True, slots=True)
class Ordinary:
    """The median of losses, and their spread in the unit of a standard deviation, above 0."""

    middle: float
    spread: float

    @classmethod
    def of(cls, losses: Sequence[float]) -> Self:
        """Return what is ordinary among these."""
        middle = statistics.median(losses)
        if not math.isfinite(middle):
            return cls(middle, 1.0)
        spread = AS_NORMAL * statistics.median(abs(loss - middle) for loss in losses)
        return cls(middle, max(spread, _LEAST_SPREAD * abs(middle)) or 1.0)

    def above(self, loss: float) -> float:
        """Return how far a loss is above the median; 0 where that is not finite itself."""
        return loss - self.middle if math.isfinite(self.middle) else 0.0

    def times(self, loss: float) -> float:
        """Return the same in units of the spread."""
        return self.above(loss) / self.spread


def recorded_before(history: History, ref: CheckpointRef) -> Ordinary | None:
    """Return what is ordinary among the last losses up to a checkpoint, those of its parents too; None where too few
    are recorded."""
    losses = lineage_metrics(history.paths, ref.run, ["loss"]).get("loss", {})
    recorded = [loss for step, loss in losses.items() if step <= ref.step][-_BEFORE:]
    return Ordinary.of(recorded) if len(recorded) >= _FEWEST else None
