"""Checkpoints of one run that hold the same weights, byte for byte, although updates were applied between them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from catalog.access.pins import pinned
from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef

__all__ = ["EqualWeights", "equal_weights"]

_SAME = """
WITH weights AS (
    SELECT run, step, bit_xor(hash(kind, name, dtype, shape, hash)) AS content, count(*) AS tensors
    FROM tensors WHERE kind IN ('model', 'master') GROUP BY run, step
)
SELECT run, list(step ORDER BY step) AS steps FROM weights GROUP BY run, content, tensors HAVING count(*) > 1
"""
_UPDATES = """
SELECT count(*) AS updates FROM (
    SELECT step, max(value) FILTER (name = 'applied') AS applied, max(abs(value)) FILTER (name = 'lr') AS lr
    FROM metrics WHERE run = $run AND step > $before AND step <= $step GROUP BY step
) WHERE applied > 0 AND coalesce(lr, 1) > 0
"""


@dataclass(frozen=True, slots=True)
class EqualWeights:
    """`ref` has the weights of `of`, an earlier step of its run, although `updates` updates were applied in between."""

    ref: CheckpointRef
    of: CheckpointRef
    updates: int

    def __str__(self) -> str:
        return (
            f"step {self.ref.step} holds the weights of step {self.of.step}, byte for byte, although {self.updates} "
            "updates with a learning rate above 0 were applied between them"
        )


def equal_weights(history: History, refs: Collection[CheckpointRef]) -> Iterator[EqualWeights]:
    """Yield those of `refs` that have exactly the weights of an earlier checkpoint of their run, if the run has
    recorded updates between them: a training moves its weights, so one of the two is published under a wrong step.
    Where there are master weights these are compared too: small updates of them need not reach the weights."""
    for row in history.query(_SAME).to_pylist():
        for before, step in zip(row["steps"], row["steps"][1:], strict=False):
            one, other = CheckpointRef(row["run"], before), CheckpointRef(row["run"], step)
            parameters = {"run": row["run"], "before": before, "step": step}
            updates = history.query(_UPDATES, parameters).to_pylist()[0]["updates"]
            if other in refs and updates and _are_equal(history, one, other):
                yield EqualWeights(other, one, updates)


def _are_equal(history: History, one: CheckpointRef, other: CheckpointRef) -> bool:
    try:
        with pinned(history.paths, one, other):
            return _weights(history, one) == _weights(history, other)
    except NotFoundError:
        # One of them was removed since the index was asked.
        return False


def _weights(history: History, ref: CheckpointRef) -> list[tuple[str, int, int, bytes]]:
    extents = history.extents(ref, kinds=["model", "master"])
    return [(extent.kind + extent.name, extent.start, extent.numel, extent.checksum) for extent in extents]
