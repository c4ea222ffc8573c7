"""Snapshots on their way, as the training thread sees them: which still read live memory, and which still wait for objects
that move after the step.
"""

from collections.abc import Callable, Sequence

from capture.snapshot.data_file import PlacedObject
from capture.snapshot.snapshot import Snapshot

__all__ = ["Pending"]


class Pending:
    """Of the training thread alone, but for `release`, which any thread may call."""

    def __init__(self) -> None:
        self._unreleased: list[Snapshot] = []
        self._unsettled: Snapshot | None = None

    @property
    def unsettled(self) -> bool:
        """Whether objects of the last snapshot may still move."""
        return self._unsettled is not None

    def add(self, snapshot: Snapshot) -> None:
        """One that has just been started; the one before must be settled."""
        self._unreleased.append(snapshot)
        self._unsettled = snapshot

    def settle(self, latest: Callable[[], Sequence[PlacedObject]] = tuple) -> None:
        """Let the last snapshot be finished, with the `latest` form of objects that have moved. What fails in asking for it
        is the snapshot's failure, not the training's.
        """
        snapshot, self._unsettled = self._unsettled, None
        if snapshot is None:
            return
        try:
            moved = latest()
        except Exception as error:  # noqa: BLE001 - a provider of the user's may raise anything
            snapshot.fail(error)
            return
        snapshot.settle(moved)

    def release(self) -> None:
        """The barrier: no snapshot reads live memory any more."""
        for snapshot in self._unreleased:
            snapshot.release()
        self._unreleased.clear()
