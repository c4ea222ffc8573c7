"""Reports failed snapshots: each as a warning at the next step, and all as one error to the caller of `wait` or
`close`.
"""

import warnings
from collections.abc import Callable, Sequence

from catalog.errors import SnapshotError

__all__ = ["Failures"]


class Failures:
    """The failures of one session. `take` returns those since it was last called."""

    def __init__(self, take: Callable[[], Sequence[SnapshotError]]) -> None:
        self.count = 0
        self._take = take
        self._warned: list[SnapshotError] = []

    def warn(self) -> None:
        """Warn of each new failure."""
        fresh = self._fresh()
        for failure in fresh:
            warnings.warn(str(failure), stacklevel=3)
        self._warned += fresh

    def raise_all(self) -> None:
        """Raise the first failure since the last call, warned of or not, with the others as its notes; none: return."""
        failures, self._warned = [*self._warned, *self._fresh()], []
        if failures:
            first, *others = failures
            for other in others:
                first.add_note(str(other))
            raise first

    def forget_warned(self) -> None:
        """Leave failures that were warned of out of the next `raise_all`."""
        self._warned = []

    def _fresh(self) -> list[SnapshotError]:
        fresh = list(self._take())
        self.count += len(fresh)
        return fresh
