"""A step that is captured after it is over: what was kept of it, and whether the rest is still as it was."""

import contextlib
import warnings
from collections.abc import Callable

from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from catalog.errors import HistoryError, SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["LateCapture"]


class LateCapture:
    """Keeps the moment of the last step that was not captured when it ended."""

    def __init__(self, source: StateListing, run: RunWriter) -> None:
        self._source = source
        self._run = run
        self._moment: TransientState | None = None
        self._moving: Callable[[], frozenset[str]] | None = None

    def remember(self, step: int, *, keep: frozenset[str], moving: Callable[[], frozenset[str]] | None) -> None:
        """Keep what will pass of a step that has just ended."""
        self._moving = moving
        try:
            self._moment = self._source.moment(step, keep=keep)
        except Exception:  # noqa: BLE001 - a provider's failure: whoever needs it later asks again, and then it is said
            self._moment = None

    def freeze(self) -> None:
        """What moves after an update has moved. Where updates may be skipped, what moves without one is kept now."""
        if self._moment is None or self._moving is None or not self._source.offers("loss_scaler"):
            return
        moving, self._moving = self._moving(), None
        with contextlib.suppress(HistoryError):
            self._moment = self._source.freeze(self._moment, moving)

    def of(self, step: int) -> TransientState | None:
        """What was kept of `step`."""
        return self._moment if self._moment is not None and self._moment.step == step else None

    def forget(self) -> None:
        """A step is captured: nothing need be kept of it."""
        self._moment = None

    def require_still(self, moment: TransientState) -> None:
        """SnapshotError when weights or optimizer state are not those of the step any more. A buffer that changed for the
        first time is only said.
        """
        changed = moment.weights.changed()
        if changed:
            raise SnapshotError(_too_late(moment, changed))
        lost = self._source.lost(moment)
        if lost:
            reason = f"buffers {', '.join(lost[:3])} have changed since the step for the first time"
            self._run.journal.event("inexact", moment.step, reason=reason)
            warnings.warn(f"step {moment.step} of run {self._run.run} is captured late: {reason}", stacklevel=5)

    def say_not_captured(self, moment: TransientState) -> None:
        """That there is no such step any more, in a warning and in the journal."""
        reason = _too_late(moment, moment.weights.changed())
        self._run.journal.event("not_captured", moment.step, reason=reason)
        warnings.warn(f"the last step of run {self._run.run} is not captured: {reason}", stacklevel=5)


def _too_late(moment: TransientState, changed: list[str]) -> str:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        f"step {moment.step} can't be captured any more: {', '.join(changed[:3])}{more} changed since; take a snapshot before such "
        "a change"
    )
