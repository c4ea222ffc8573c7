"""How failed snapshots are told: each as a warning at the next step, and as one error to whoever asks."""

import warnings
from collections.abc import Callable, Sequence

from catalog.errors import SnapshotError

__all__ = ["Failures"]


class Failures:
    """Those of one session. `take` gives the ones that nobody has been told of yet."""

    def __init__(self, take: Callable[[], Sequence[SnapshotError]]) -> None:
        self.count = 0
        self._take = take
        self._warned: list[SnapshotError] = []

    def warn(self) -> None:
        """Warn of each new one."""
        fresh = self._fresh()
        for failure in fresh:
            warnings.warn(str(failure), stacklevel=3)
        self._warned += fresh

    def raise_all(self) -> None:
        """SnapshotError with all since the last call, also those that were warned of; the others are its notes."""
        failures, self._warned = [*self._warned, *self._fresh()], []
        if failures:
            first, *others = failures
            for other in others:
                first.add_note(str(other))
            raise first

    def forget_warned(self) -> None:
        """Those that were warned of are told: only what is new is an error from now on."""
        self._warned = []

    def _fresh(self) -> list[SnapshotError]:
        fresh = list(self._take())
        self.count += len(fresh)
        return fresh
