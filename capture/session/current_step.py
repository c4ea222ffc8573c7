"""The life of the current step: from the update that makes it to the update that ends its time in memory.

                                                  edit_begins, edit_ended
                                                         ┌──┐
                                                         │  ▼
    FINAL ── update_begins ──▶ UPDATING ── update_ended ──▶ ENDED ── finalize_objects ──▶ FINAL
      ▲                                                       ▲                            │
      │                                            the initial state                       │
      └────────────────────────────────────────────────────────────────────────────────────┘

UPDATING  The optimizer is writing: the state is half old and half new, and belongs to no step.
ENDED     The update is over. Tensors, and objects with `read_at = "step"`, have their values, unless a declared edit
          gives them others. Objects with `read_at = "next_forward"` (a scheduler, a scaler, an average of the weights)
          may still advance.
FINAL     All that belongs to the step has its value: the next training forward, the next update, or a call such as
          `wait` has begun. Generators, the data loader and buffers may be ahead of the step already.

Beside that, a step that has ended is one of

captured  `capture` was called with a snapshot that has begun. It is finished, and published, only when the step is
          FINAL. Where Ctrl-C has ended that call, the step is kept, and its snapshot begins when it becomes FINAL.
kept      It is not captured, but can be later, by `snapshot()` or `close`: `keep` has copied the state that does not
          stay until the next update, and `require_unchanged` finds out whether the rest has stayed. Where an update may
          be skipped without any event, objects advance after FINAL too; then they are kept when the step becomes FINAL.
          Elsewhere they are read when the step is captured.
edited    A declared edit has changed it between its update and the next forward. What it is now is read when it becomes
          FINAL, so that it is the state that the next step starts from. A snapshot that had begun is dropped by the
          edit, and a new one begins then; a step that was kept is kept on.
neither   Keeping has failed, or nothing has ended yet: a late capture reads everything as it is then.

The fingerprint of a step is taken when its update has ended, or anew when it becomes FINAL after an edit, and handed on
then.

An edit after the next forward has begun is part of the next step: the snapshot is finished first. An edit of a step
that is captured and FINAL because of a call comes too late for it, and is reported.

A snapshot reads live memory beyond FINAL, until `release`: that is the barrier, which nothing that writes the state may
pass before it returns.
"""

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from capture.changes.change_detector import ChangeDetector, Check
from capture.changes.fingerprints import Fingerprint
from capture.data_file.data_file import PlacedObject
from capture.snapshot.snapshot import Snapshot
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import KeptBuffers, TransientState
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
    capture_again: begins the snapshot of a step anew with `capture`, or reports why it can't
    fingerprint_taken: gets the fingerprint of each step that `take_fingerprint` has taken, once the step is final
    became_final: called when a step has become FINAL, with what was kept of it; None where keeping has failed
    """

    def __init__(
        self,
        listing: StateListing,
        run: RunWriter,
        *,
        may_skip_updates: bool,
        check: Check,
        capture_again: Callable[[int], None],
        fingerprint_taken: Callable[[Fingerprint], None] = lambda _: None,
        became_final: Callable[[TransientState | None], None] = lambda _: None,
    ) -> None:
        self._listing = listing
        self._run = run
        self._may_skip_updates = may_skip_updates
        self._check = check
        self._capture_again = capture_again
        self._fingerprint_taken = fingerprint_taken
        self._became_final = became_final
        self._fingerprint: Fingerprint | None = None
        self._is_edited = False
        self._phase = _Phase.ENDED
        self._is_initial = True
        self._next_has_begun = False
        self._is_captured = False
        self._last_captured: int | None = None
        self._kept: TransientState | None = None
        self._unfinalized: Snapshot | None = None
        self._unreleased: Snapshot | None = None
        self._postponed: int | None = None
        self._edits_under_way = 0
        self._before_edit: Mapping[int, Sequence[PlacedObject]] = {}
        self._is_half_edited = False
        self._releasing = threading.RLock()

    # Events.

    def update_begins(self) -> None:
        """The optimizer is about to write: finalize the step before, and return once nothing reads its memory."""
        self.finalize_objects()
        self.release()
        self._phase = _Phase.UPDATING
        self._is_half_edited = False

    def forward_begins(self) -> None:
        """Finalize the step: what is written from now on is part of the next one. A forward within a declared edit,
        such as an evaluation with other weights, is none of these.
        """
        if not self._edits_under_way:
            self.finalize_objects()
            self._next_has_begun = True

    def update_ended(self) -> None:
        """Note that the update is over and that the state is now that of a new step."""
        # After `update_begins` this does nothing; a loop that has not called it must leave no snapshot waiting.
        self.finalize_objects()
        self._phase = _Phase.ENDED
        self._is_initial = self._next_has_begun = self._is_captured = False
        self._kept = None

    def finalize_objects(self) -> None:
        """ENDED becomes FINAL: begin the snapshot of an edited step anew, and read the objects that advance until the
        next forward. An error in reading them fails the step's snapshot, not the training.
        """
        if self._phase is not _Phase.ENDED:
            return
        if self._postponed is not None:
            self._capture_again(self._postponed)
            self._postponed = None
        self._phase = _Phase.FINAL
        snapshot = self._unfinalized
        try:
            self._became_final(self._kept or self._kept_by_snapshot())
            self._hand_on_fingerprint()
            self._unfinalized = None
            self._finalize_objects_of(snapshot)
        except BaseException:
            # Ctrl-C while a provider is read: the training may go on, and its next event finalizes the step.
            if snapshot is not None and not snapshot.finalized.is_set():
                self._unfinalized = snapshot
            self._phase = _Phase.ENDED
            raise

    def _finalize_objects_of(self, snapshot: Snapshot | None) -> None:
        try:
            if snapshot is not None:
                # Nothing advances before the first update: the initial state is that of `enable`.
                snapshot.finalize_objects(() if self._is_initial else self._listing.read_next_forward())
            elif self._kept is not None and self._may_skip_updates:
                self._kept = self._listing.keep_next_forward(self._kept)
        except Exception as error:  # noqa: BLE001 - a user's provider may raise anything
            # Without a snapshot the objects stay live: a late capture reads them, and reports the error.
            if snapshot is not None:
                snapshot.fail(error)

    def _kept_by_snapshot(self) -> TransientState | None:
        """Return what the snapshot of the current step, if it is still to be finalized, has read right after it."""
        snapshot = self._unfinalized
        return (
            None
            if snapshot is None
            else TransientState(snapshot.step, None, KeptBuffers({}, {}), snapshot.read_at_step)
        )

    def edit_begins(self) -> None:
        """A declared edit is about to begin: return once nothing reads the state. It drops a snapshot that is not
        final, and nothing of it stays on the disk.
        """
        if self._unfinalized is not None:
            with self._releasing:
                self._kept = self._kept_by_snapshot()
                snapshot, self._unfinalized, self._unreleased = self._unfinalized, None, None
                self._postponed = snapshot.step
                snapshot.drop()
        self.release()
        if self._kept is not None and not self._edits_under_way and not self._next_has_begun:
            self._before_edit = self._listing.read_at_step()
        self._edits_under_way += 1

    def edit_ended(self, *, whole: bool) -> None:
        """The edit is over; not `whole`: an exception has ended it, and the state is half edited."""
        self._edits_under_way -= 1
        self._is_half_edited |= not whole
        self._is_edited = True
        if self._edits_under_way or self._phase is _Phase.UPDATING:
            return
        if self._next_has_begun:
            self.accessed()
        elif self._kept is not None:
            self._kept = self._listing.keep_edited(self._kept, before=self._before_edit)
            self._phase = _Phase.ENDED
        elif self._is_captured:
            reason = "an edit after the step was final, and perhaps committed, is not in its checkpoint"
            self._run.journal.event("edited_after_commit", self._last_captured, reason=reason)
            warn_user(
                f"step {self._last_captured} of run {self._run.run} stays as it was before this edit, so a training "
                "that is restored from it goes on without the edit: edit before session.wait() or session.snapshot()"
            )

    def give_up_half_edited(self) -> int | None:
        """Forget the step whose snapshot an edit has dropped and an exception has left half edited; return it."""
        if not self._is_half_edited or self._phase is not _Phase.ENDED:
            return None
        step, self._postponed, self._kept = self._postponed, None, None
        self._fingerprint = None
        return step

    def accessed(self) -> None:
        """Note that the state was loaded or moved, perhaps without a trace."""
        if self._kept is not None:
            self._kept = replace(self._kept, accessed=True)

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

    @property
    def is_being_edited(self) -> bool:
        """True while a declared edit is under way."""
        return self._edits_under_way > 0

    def is_captured(self, step: int) -> bool:
        """Return whether a snapshot of `step` was begun in this session."""
        return step == self._last_captured

    def capture(self, begin: Callable[[], Snapshot]) -> Snapshot:
        """Make the snapshot of the current step with `begin`, which starts to read the state. A release that another
        thread asks for meanwhile waits for this snapshot too.
        """
        with self._releasing:
            snapshot = self._unreleased = begin()
        self._last_captured, self._is_captured, self._kept = snapshot.step, True, None
        if self._phase is _Phase.ENDED:
            self._unfinalized = snapshot
        else:
            snapshot.finalize_objects((), at_once=True)
        return snapshot

    def keep(self, step: int, *, capture: bool = False) -> None:
        """Keep the part of the state of `step` that a late capture could no longer read; with `capture` that capture
        begins when the step becomes FINAL, as after an edit."""
        if capture:
            self._postponed = step
        try:
            self._kept = self._listing.keep(step, check=self._check)
        except Exception:  # noqa: BLE001 - a provider's failure: a late capture asks it again, and reports the error
            self._kept = None

    def take_fingerprint(self, step: int) -> None:
        """Take the fingerprint of `step`, which has just ended; what `keep` has read of it is not read again."""
        kept = self.kept(step)
        self._is_edited = False
        self._fingerprint = self._read_fingerprint(step, None if kept is None else kept.weights)

    def _read_fingerprint(self, step: int, detector: ChangeDetector | None) -> Fingerprint | None:
        try:
            return self._listing.fingerprint(step, check=self._check, detector=detector)
        except Exception:  # noqa: BLE001 - what fails here fails a snapshot, by name; this step has no fingerprint
            return None

    def _hand_on_fingerprint(self) -> None:
        found, self._fingerprint = self._fingerprint, None
        if found is not None and self._is_edited:
            found = self._read_fingerprint(found.step, None)
        if found is not None:
            self._fingerprint_taken(found)

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
