"""The events of one training loop: decides which steps become snapshots, and measures how long the training waits."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

import native
from capture.collectives import Ranks
from capture.loops.batch_digest import BatchDigest
from capture.loops.interface import Loop
from capture.publishing.committer import Committer
from capture.redo_log.recorder import RedoRecorder
from capture.session.current_step import CurrentStep
from capture.session.options import SessionOptions
from capture.snapshot.failures import Failures
from capture.snapshot.snapshot import Snapshot
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from catalog.errors import SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["MAX_PENDING", "Observer", "StepEvents"]

MAX_PENDING = 4
"""Snapshots on their way at once, before `on_full` decides."""

_MOST_STALLS = 10_000
"""Steps whose stalls are remembered one by one."""


class Observer(Protocol):
    """Is told of the steps of a session, on the training thread; may change what the next update reads."""

    def update_begins(self, step: int) -> None:
        """The update beyond `step` is about to begin, and nothing reads the state any more. May end the training."""

    def step_ended(self, step: int, metrics: Mapping[str, float | torch.Tensor]) -> Mapping[str, float | torch.Tensor]:
        """The step is over; return the metrics that are recorded of it."""

    def end(self) -> None:
        """The session is being closed."""


class StepEvents:
    """The LoopEvents of one session. Every method is for the training thread, except `before_access` and `editing`.

    Nothing that goes wrong with a snapshot reaches the training, except in `begin` and `snapshot_now`, which are asked
    for one step and raise.

    close: closes the session, when the loop ends its life
    observer: is told of every step
    redo: records what each update consumes
    """

    def __init__(
        self,
        loop: Loop,
        listing: StateListing,
        *,
        run: RunWriter,
        writer: native.Writer,
        committer: Committer,
        failures: Failures,
        options: SessionOptions,
        close: Callable[[], None],
        observer: Observer | None = None,
        redo: RedoRecorder | None = None,
    ) -> None:
        self.current = CurrentStep(
            listing,
            run,
            may_skip_updates=loop.may_skip_updates(),
            check=options.check,
            capture_again=self._try_capture,
            fingerprint_taken=committer.fingerprint,
            became_final=self._step_is_final,
        )
        self.skipped = 0
        self.stall_s = 0.0
        self.stalls_s: collections.deque[float] = collections.deque(maxlen=_MOST_STALLS)
        self._loop = loop
        self._listing = listing
        self._run = run
        self._writer = writer
        self._committer = committer
        self._ranks = Ranks(run.rank, run.world_size)
        self._failures = failures
        self._options = options
        self._close = close
        self._observer = observer
        self._redo = redo
        self._due = False
        self._has_begun_redo = False
        self._stall_s = 0.0
        self._thread = threading.get_ident()

    # LoopEvents.

    def before_update(self) -> None:
        began = time.perf_counter()
        self.current.update_begins()
        if self._redo is not None:
            self._begin_redo_log()
            self._redo.update_begins()
        self._stall_s += time.perf_counter() - began
        if self._observer is not None:
            self._observer.update_begins(self._loop.step())

    @property
    def names_batches(self) -> bool:
        return self._options.fingerprints

    def after_step(
        self, *, applied: bool, metrics: Mapping[str, float | torch.Tensor], batch: BatchDigest | None
    ) -> None:
        began = time.perf_counter()
        step = self._loop.step()
        self.current.update_ended()
        if self._redo is not None:
            self._redo.update_ended(step, applied=applied)
        self._failures.warn()
        try:
            self._capture_or_keep(step, applied=applied)
        finally:
            # The step is over also when Ctrl-C came while a provider was read.
            self._tell_of_step(step, metrics, batch, began=began, applied=applied)

    def _capture_or_keep(self, step: int, *, applied: bool) -> None:
        due = self._options.is_due(step) or self._due
        # A step whose update was skipped is no new state: the next one that is applied is captured instead.
        self._due = due and not applied
        try:
            if due and applied:
                self._try_capture(step, due=True)
            if not self.current.is_captured(step):
                self.current.keep(step)
        except BaseException:
            # Ctrl-C while a provider is read: it stops the training here, and drops nothing.
            if not self.current.is_captured(step):
                self.current.keep(step, capture=due and applied)
            raise

    def _tell_of_step(
        self,
        step: int,
        metrics: Mapping[str, float | torch.Tensor],
        batch: BatchDigest | None,
        *,
        began: float,
        applied: bool,
    ) -> None:
        if self._options.fingerprints:
            self.current.take_fingerprint(step)
        if batch is not None:
            self._committer.batch(step, batch)
        self._stall_s += time.perf_counter() - began
        if self._observer is not None:
            metrics = self._observer.step_ended(step, metrics)
        self._committer.metrics(step, {**metrics, "applied": float(applied), "stall_s": self._stall_s})
        self.stall_s += self._stall_s
        self.stalls_s.append(self._stall_s)
        self._stall_s = 0.0

    def next_forward(self) -> None:
        self.current.forward_begins()

    @contextlib.contextmanager
    def editing(self, what: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            # Nobody knows where in its step the training is: it is kept as it is at the barrier.
            self.before_access(what)
            try:
                yield
            finally:
                self.layout_changed()
            return
        self.current.edit_begins()
        self._note_written(f"session.{what}()" if what == "modify" else what)
        whole = False
        try:
            yield
            whole = True
        finally:
            self._listing.forget_tensors()
            self.current.edit_ended(whole=whole)

    def before_access(self, what: str) -> None:
        # Providers may be asked on the training thread only; the barrier holds for every thread.
        # Within a declared edit the step is not final yet.
        if threading.get_ident() == self._thread and not self.current.is_being_edited:
            self.current.finalize_objects()
        self.current.release()
        self._note_written(what)

    def layout_changed(self) -> None:
        self.current.accessed()
        self._listing.forget_tensors()

    def closing(self) -> None:
        self._close()

    @property
    def is_being_written(self) -> bool:
        """True while an update or a declared edit is under way."""
        return self.current.is_updating or self.current.is_being_edited

    # Snapshots.

    def will_be_captured(self, step: int) -> bool:
        """Return whether `step` is to come, and due."""
        return step > self._loop.step() and (self._options.is_due(step) or self._due)

    def begin(self) -> None:
        """Capture the state that the session begins with."""
        step = self._loop.step()
        self._capture(step)
        if self._options.fingerprints:
            self.current.take_fingerprint(step)

    def snapshot_now(self) -> int:
        """Capture the step that has just ended, unless it is captured; return its number."""
        step = self._loop.step()
        if not self.current.is_captured(step):
            self.current.finalize_objects()
            self._capture(step)
        return step

    def capture_last(self) -> None:
        """Capture the step that has just ended, unless there is none: after an exception inside an update the state is
        half new.
        """
        step = self._loop.step()
        if self.current.is_updating or self.current.is_captured(step) or self._is_lost(step):
            return
        self.current.finalize_objects()
        self._try_capture(step)

    def give_up_half_edited(self) -> None:
        """Report the step that was due and is half edited: an exception has left its edit, and ends the session."""
        step = self.current.give_up_half_edited()
        if step is not None:
            reason = "an exception has ended session.modify() after the step, so its state is half edited"
            self._committer.failed(step, SnapshotError(reason))

    def _step_is_final(self, kept: TransientState | None) -> None:
        if self._redo is not None:
            self._redo.is_final(None if kept is None else lambda: self._listing.read_objects(kept).placed)

    def _note_written(self, how: str) -> None:
        if self._redo is not None:
            self._redo.state_written(how)

    def _is_lost(self, step: int) -> bool:
        try:
            return self.current.warn_if_lost(step)
        except Exception as error:  # noqa: BLE001 - a device that can't compare its memory ends no training
            self._committer.failed(step, error)
            self._failures.warn()
            return True

    def _try_capture(self, step: int, *, due: bool = False) -> None:
        try:
            self._capture(step, due=due)
        except Exception as error:  # noqa: BLE001 - a user's provider may raise anything, and no snapshot ends a training
            self._committer.failed(step, error)
            self._failures.warn()

    def _capture(self, step: int, *, due: bool = False) -> None:
        self.current.release()
        # Only steps that are due may be skipped: there all ranks are here at once and skip together, or none does.
        if due and self._options.on_full == "skip" and self._ranks.any(self._committer.pending() >= MAX_PENDING):
            self.skipped += 1
            self._run.journal.event("skipped", step, reason=f"{MAX_PENDING} snapshots were still being written")
            return
        self._require_uncaptured(step, due=due)
        self._require_room(step, due=due)
        if self._run.world_size > 1 and self._committer.has_failed(step):
            raise SnapshotError(f"step {step} has failed on this rank already, and the other ranks remove their parts")
        self._committer.wait_below(MAX_PENDING)
        kept = self.current.kept(step)
        if kept is not None:
            self.current.require_unchanged(kept)
        if self._redo is not None:
            self._redo.capture_begins(step)
        snapshot = self.current.capture(
            lambda: Snapshot.start(
                self._listing,
                self._writer,
                self._run,
                step,
                check=self._options.check,
                deduplicator=self._committer.deduplicator,
                kept=kept,
            )
        )
        if self._redo is not None:
            self._redo.captured()
        self._committer.submit(snapshot)

    def _require_uncaptured(self, step: int, *, due: bool) -> None:
        """Raise SnapshotError when the step is captured: a load may have counted the steps back. One that is being
        captured is waited for, since both would write the same files.

        Before all ranks ask for room together, all raise it or none does.
        """
        error: Exception | None = None
        try:
            if self._committer.is_pending(step):
                self._committer.wait_below(1)
            self._run.require_uncaptured(step)
        except Exception as found:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            error = found
        retention = self._committer.retention
        if due and retention is not None and retention.has_budget and self._ranks.any(error is not None):
            raise error or SnapshotError(f"step {step} of run {self._run.run} is captured already by another rank")
        if error is not None:
            raise error

    def _begin_redo_log(self) -> None:
        """Give the redo log of each rank its first share before the first update, to which all ranks come together."""
        if not self._has_begun_redo:
            self._has_begun_redo = True
            with contextlib.suppress(Exception), self._redo_room_shared(together=True):
                pass

    @contextlib.contextmanager
    def _redo_room_shared(self, *, together: bool) -> Iterator[None]:
        """Know in the body what the redo logs take, which write nothing meanwhile; afterwards share what is left. Does
        nothing without a redo log, without a budget, or when the ranks are not here `together`."""
        room = None if self._redo is None else self._redo.room
        retention = self._committer.retention
        if room is None or retention is None or not together:
            yield
            return
        granted = 0
        try:
            retention.redo_told(self._ranks.gather(room.tell()))
            yield
        finally:
            try:
                with contextlib.suppress(Exception):
                    granted = self._ranks.broadcast(retention.redo_grants())[self._run.rank]
            finally:
                room.grant(granted)

    def _require_room(self, step: int, *, due: bool) -> None:
        """Raise SnapshotError when the budget of the session's policy has no room for a snapshot, also after the
        upkeep.

        All ranks come here together at a step that is due, and none begins what another one has no room for.
        """
        retention = self._committer.retention
        if retention is None or not retention.has_budget:
            return
        with self._redo_room_shared(together=due or self._run.world_size == 1):
            planned = self._planned_bytes()
            admitted = retention.admit(step, planned)
            if not admitted:
                self._committer.make_room()
                admitted = retention.admit(step, planned)
            refusal = retention.refusal(step, planned)
            refused = (due and self._ranks.any(not admitted)) or not admitted
        if refused:
            raise refusal

    def _planned_bytes(self) -> int:
        try:
            return self._listing.planned_bytes(self._committer.deduplicator.stored)
        except Exception:  # noqa: BLE001 - a user's provider may raise anything; the snapshot itself reports it
            return 0
