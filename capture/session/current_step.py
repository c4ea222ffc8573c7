"""The life of the current step: from the update that makes it to the update that ends its time in memory.

    FINAL ── update_begins ──▶ UPDATING ── update_ended ──▶ ENDED ── finalize_objects ──▶ FINAL
      ▲                                                                                    │
      └────────────────────────────────── the initial state ───────────────────────────────┘

UPDATING  The optimizer is writing: the state is half old and half new, and belongs to no step.
ENDED     The update is over. Tensors, and objects with `read_at = "step"`, have their values. Objects with
          `read_at = "next_forward"` (a scheduler, a scaler, an average of the weights) may still advance.
FINAL     All that belongs to the step has its value: the next training forward, the next update, or a call such as
          `wait` or `modify` has begun. Generators, the data loader and buffers may be ahead of the step already.

Beside that, a step that has ended is one of

captured  `capture` was called with a snapshot that has begun. It is finished only when its objects are final: at once,
          unless the step is ENDED.
kept      It is not captured, but can be later, by `snapshot()` or `close`: `keep` has copied the state that does not
          stay until the next update, and `require_unchanged` finds out whether the rest has stayed. Where an update may
          be skipped without any event, objects advance after FINAL too; then they are kept when the step becomes FINAL.
          Elsewhere they are read when the step is captured.
neither   Keeping has failed, or nothing has ended yet: a late capture reads everything as it is then.

A snapshot reads live memory beyond FINAL, until `release`: that is the barrier, which nothing that writes the state may
pass before it returns.
"""

import enum
import threading
from collections.abc import Callable
from dataclasses import replace

from capture.snapshot.change_detector import Check
from capture.snapshot.snapshot import Snapshot
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from capture.user_warning import warn_user
from catalog.errors import SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["CurrentStep"]


class _Phase(enum.Enum):
    UPDATING = enum.auto()
    ENDED = enum.auto()
    FINAL = enum.auto()


class CurrentStep:
    """The state machine of the current step. For the training thread, except `release`, which any thread may call.

    may_skip_updates: objects that are read at the next forward may advance again without an update, when one is skipped
    check: what is compared to find out whether a step that is captured late is still in memory
    """

    def __init__(self, listing: StateListing, run: RunWriter, *, may_skip_updates: bool, check: Check) -> None:
        self._listing = listing
        self._run = run
        self._may_skip_updates = may_skip_updates
        self._check = check
        self._phase = _Phase.FINAL
        self._last_captured: int | None = None
        self._kept: TransientState | None = None
        self._unfinalized: Snapshot | None = None
        self._unreleased: Snapshot | None = None
        self._releasing = threading.RLock()

    # Events.

    def update_begins(self) -> None:
        """The optimizer is about to write: finalize the step before, and return once nothing reads its memory."""
        self.finalize_objects()
        self.release()
        self._phase = _Phase.UPDATING

    def update_ended(self) -> None:
        """Note that the update is over and that the state is now that of a new step."""
        # After `update_begins` this does nothing; a loop that has not called it must leave no snapshot waiting.
        self.finalize_objects()
        self._phase = _Phase.ENDED
        self._kept = None

    def finalize_objects(self) -> None:
        """ENDED becomes FINAL: read the objects that advance until the next forward. An error in reading them fails the
        step's snapshot, not the training.
        """
        if self._phase is not _Phase.ENDED:
            return
        self._phase = _Phase.FINAL
        snapshot, self._unfinalized = self._unfinalized, None
        try:
            if snapshot is not None:
                snapshot.finalize_objects(self._listing.read_next_forward())
            elif self._kept is not None and self._may_skip_updates:
                self._kept = self._listing.keep_next_forward(self._kept)
        except Exception as error:  # noqa: BLE001 - a user's provider may raise anything
            # Without a snapshot the objects stay live: a late capture reads them, and reports the error.
            if snapshot is not None:
                snapshot.fail(error)

    def edited(self) -> None:
        """Note a declared edit of the state."""
        if self._kept is not None:
            self._kept = replace(self._kept, edited=True)

    def release(self) -> None:
        """The barrier: return once no snapshot reads live memory any more."""
        with self._releasing:
            if self._unreleased is not None:
                self._unreleased.release()
                # Before that, more of its objects' memory is still to be read.
                if self._unreleased.finalized.is_set():
                    self._unreleased = None

    # Capturing.

    @property
    def is_updating(self) -> bool:
        """True while an update is under way, or was when an exception ended it: the state belongs to no step."""
        return self._phase is _Phase.UPDATING

    def is_captured(self, step: int) -> bool:
        """Return whether a snapshot of `step` was begun in this session."""
        return step == self._last_captured

    def capture(self, begin: Callable[[], Snapshot]) -> Snapshot:
        """Make the snapshot of the current step with `begin`, which starts to read the state. A release that another
        thread asks for meanwhile waits for this snapshot too.
        """
        with self._releasing:
            snapshot = self._unreleased = begin()
        self._last_captured, self._kept = snapshot.step, None
        if self._phase is _Phase.ENDED:
            self._unfinalized = snapshot
            if not self._listing.advances_until_next_forward:
                self.finalize_objects()
        else:
            snapshot.finalize_objects((), at_once=True)
        return snapshot

    def keep(self, step: int) -> None:
        """Keep the part of the state of `step` that a late capture could no longer read."""
        try:
            self._kept = self._listing.keep(step, check=self._check)
        except Exception:  # noqa: BLE001 - a provider's failure: a late capture asks it again, and reports the error
            self._kept = None

    def kept(self, step: int) -> TransientState | None:
        """Return what was kept of `step`."""
        return self._kept if self._kept is not None and self._kept.step == step else None

    def require_unchanged(self, kept: TransientState) -> None:
        """Raise SnapshotError when weights or optimizer state are not those of the step any more. A large buffer that
        has changed for the first time, so that there is no copy, only causes a warning and an entry in the journal.
        """
        changed = self._listing.changed(kept)
        if changed:
            raise SnapshotError(_too_late(kept, changed))
        lost = self._listing.lost_buffers(kept)
        if lost:
            reason = f"buffers {', '.join(lost[:3])} have changed since the step for the first time"
            self._run.journal.event("inexact", kept.step, reason=reason)
            warn_user(f"step {kept.step} of run {self._run.run} is captured late: {reason}")

    def warn_if_lost(self, step: int) -> bool:
        """Return whether `step`, the last one, can't be captured any more; a warning and the journal then say so.

        Weights that were loaded for an evaluation, or half an update, are no step at all, and no failure either.
        """
        kept = self.kept(step)
        changed = [] if kept is None else self._listing.changed(kept)
        if kept is None or not changed:
            return False
        reason = _too_late(kept, changed)
        self._run.journal.event("not_captured", step, reason=reason)
        warn_user(f"the last step of run {self._run.run} is not captured: {reason}")
        return True


def _too_late(kept: TransientState, changed: list[str]) -> str:
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return (
        f"step {kept.step} can't be captured any more: {', '.join(changed[:3])}{more} changed since; take a snapshot "
        "before such a change"
    )
