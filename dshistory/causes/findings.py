"""A finding: one thing that a training did which it did not do before, or which its optimizer can not have done."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Finding", "named"]


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """`since` and `step`: it set in after the first and at the second at the latest; `tensors` are those that it hit,
    none for all of them.

    A `certain` finding contradicts arithmetic or is written down in the history; any other one is a deviation from the
    run's own past, and `surprise` says by how many standard deviations (`dshistory.causes.robust`)."""

    cause: str
    since: int
    step: int
    tensors: Sequence[str]
    evidence: str
    call: str
    certain: bool = True
    surprise: float = float("inf")


def named(tensors: Sequence[str]) -> str:
    """Return the tensors as text: the first three, and how many more."""
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ", ".join(tensors[:3]) + more
