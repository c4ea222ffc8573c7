"""Reports failed snapshots: each as a warning, at the next step or at the end, and all as one error to the caller of
`wait`, or of a `close` that was asked to raise.
"""

from collections.abc import Callable, Sequence

from capture.user_warning import warn_user
from catalog.errors import SnapshotError

__all__ = ["Failures"]


class Failures:
    """The failures of one session. `take` returns those since it was last called."""

    def __init__(self, take: Callable[[], Sequence[SnapshotError]]) -> None:
        self._take = take
        self._all: list[SnapshotError] = []
        self._reported = 0
        self._raised = 0

    def all(self) -> list[SnapshotError]:
        """Return every failure so far in order, warned of, raised or neither."""
        self._all += self._take()
        return list(self._all)

    def warn(self) -> None:
        """Warn of each failure that neither a warning nor an error has reported."""
        failures, first = self.all(), self._reported
        # Before the first warning: where warnings are errors, the next call does not begin with the same one.
        self._reported = len(failures)
        for failure in failures[first:]:
            warn_user(str(failure))

    def raise_all(self) -> None:
        """Raise the first failure since the last call, warned of or not, with the others as its notes; none: return."""
        failures, first = self.all(), self._raised
        self._raised = self._reported = len(failures)
        if failures[first:]:
            error, *others = failures[first:]
            for other in others:
                error.add_note(str(other))
            raise error
