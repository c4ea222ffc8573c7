"""A run being captured: decides when a step becomes a snapshot, keeps the barrier, and reports.

The training thread plans, starts and releases; the publisher's thread does the rest. Nothing a snapshot does wrong
reaches the training: a failure is a warning at the next step, an event in the journal, and a SnapshotError from `wait`
and `close`.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

import native
from capture.loops.interface import Loop
from capture.session.committer import Committer
from capture.session.late_capture import LateCapture
from capture.session.pending import Pending
from capture.session.stats import SessionStats
from capture.session.user_records import checked_metrics, checked_tag
from capture.snapshot.change_detector import Check
from capture.snapshot.failures import Failures
from capture.snapshot.snapshot import Snapshot
from capture.snapshot.state_listing import StateListing
from capture.snapshot.transient_state import TransientState
from catalog.errors import HistoryError, SetupError, SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["Session", "SessionStats"]

MAX_PENDING = 4
"""Snapshots on their way at once, before `on_full` decides."""

_open: weakref.WeakSet["Session"] = weakref.WeakSet()

_COMMIT_POLL_S = 0.002
_COMMIT_PATIENCE_S = 30.0


class Session:
    """The capture of one run, from `capture.enable` to `close`. Its methods are for the training thread.

    A context manager: leaving it closes the session; after an exception the last step is not captured, for it may be
    half done.
    """

    def __init__(
        self,
        loop: Loop,
        source: StateListing,
        *,
        run: RunWriter,
        writer: native.Writer,
        every: int,
        on_full: Literal["wait", "skip"],
        check: Check = "versions",
        stats_every: int = 1,
    ) -> None:
        self._loop = loop
        self._source = source
        self._run = run
        self._writer = writer
        self._every = every
        self._on_full = on_full
        self._check = check
        self._publisher = Committer(run, stats_every=stats_every)
        self._failures = Failures(self._publisher.take_failures)
        self._pending = Pending()
        self._moving: Callable[[], frozenset[str]] | None = None
        self._late = LateCapture(source, run)
        self._last: int | None = None
        self._due = False
        self._stall_s = 0.0
        self._stats = SessionStats()
        self._closed = False
        self._updating = False
        self._thread = threading.get_ident()
        _open.add(self)
        self._detach: Callable[[], None] = lambda: None
        self._begin_at_once()

    @property
    def run(self) -> str:
        """The run's id."""
        return self._run.run

    @property
    def history(self) -> Path:
        """The history's folder."""
        return self._run.paths.root

    @property
    def stats(self) -> SessionStats:
        """The cost so far."""
        stats = self._stats
        stats.failed = self._failures.count
        figures = self._publisher.figures()
        stats.snapshots = len(figures)
        stats.bytes = sum(int(item["file_bytes"]) for item in figures)
        stats.unchanged_bytes = sum(int(item["unchanged_bytes"]) for item in figures)
        stats.write_s = sum(float(item["write_s"]) for item in figures)
        return stats

    def snapshot(self) -> int:
        """Capture the step that has just ended, whether due or not; returns its number. A captured step is not captured
        again.
        """
        self._require_open()
        step = self._loop.step()
        if step != self._last:
            self._take(step, moment=self._late.of(step))
            self._pending.settle()
        return step

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Record metrics of the step that has just ended; one-element tensors are read off the training thread.
        SetupError for anything but real numbers.
        """
        self._require_open()
        self._publisher.metrics(self._loop.step(), checked_metrics(metrics))

    def tag(self, name: str, step: int | None = None) -> None:
        """Give a step (default: the one that has just ended) a name that `restore` and `diff` take. SetupError for what
        would read as a step.
        """
        self._require_open()
        self._run.journal.tag(*checked_tag(name, self._loop.step() if step is None else step))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every snapshot started so far is committed. SnapshotError when one failed, or when the time is
        over. Returns at once when the session is closed: `close` has said what there was to say. To be called when all
        that belongs to the step has moved, the scheduler too.

        Among several ranks it also waits for the others' parts, at most half a minute without `timeout_s`.
        """
        if self._closed:
            return
        deadline = time.monotonic() + (_COMMIT_PATIENCE_S if timeout_s is None else timeout_s)
        self.settled()
        if not self._publisher.wait_below(1, timeout_s=timeout_s):
            raise SnapshotError(
                f"run {self.run}: {self._publisher.pending()} snapshots still pending after {timeout_s} s"
            )
        self._failures.raise_all()
        last = self._publisher.last_published()
        while last is not None and not self._run.paths.marker(self.run, last).exists():
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"step {last} of run {self.run} is not committed: the part of another rank is missing"
                )
            time.sleep(_COMMIT_POLL_S)

    @contextlib.contextmanager
    def modify(self) -> Iterator[None]:
        """Wrap edits of captured state between steps: pending snapshots are made safe first."""
        self.before_access("modify")
        try:
            yield
        finally:
            self.layout_changed()

    def close(self) -> None:
        """Capture the last step, finish everything, let the loop go. Idempotent. SnapshotError when a snapshot failed
        unreported.
        """
        self._close(capture_last=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(SnapshotError):
            self._close(capture_last=False)

    # What the loop tells (LoopEvents).

    def before_update(self) -> None:
        began = time.perf_counter()
        self.settled()
        self._pending.release()
        self._stall_s += time.perf_counter() - began
        self._updating = True

    def after_step(
        self,
        *,
        applied: bool,
        metrics: Mapping[str, float | torch.Tensor],
        moving: Callable[[], frozenset[str]] | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> None:
        began = time.perf_counter()
        self._updating = False
        step = self._loop.step()
        self._failures.warn()
        self._moving = moving
        if step % self._every == 0 or self._due:
            self._due = not applied
            if applied:
                self._try(step)
                if moving is None and not self._source.of_user:
                    self._pending.settle()
        if step != self._last:
            self._late.remember(step, keep=keep, moving=moving)
        self._stall_s += time.perf_counter() - began
        self._publisher.metrics(step, {**metrics, "applied": float(applied), "stall_s": self._stall_s})
        self._stats.stall_s += self._stall_s
        self._stats.stalls_s.append(self._stall_s)
        self._stall_s = 0.0

    def settled(self) -> None:
        if self._pending.unsettled:
            self._pending.settle(lambda: self._source.latest(frozenset() if self._moving is None else self._moving()))
        else:
            self._late.freeze()

    def before_access(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self.settled()
        self._pending.release()

    def layout_changed(self) -> None:
        self._source.forget()

    def closing(self) -> None:
        self.close()

    # The rest.

    def at_exit(self) -> None:
        """What the interpreter's exit does: keep what is pending, capture the last step unless the script has failed."""
        try:
            self._close(capture_last=not hasattr(sys, "last_value"))
        except HistoryError as error:
            warnings.warn("\n".join([str(error), *getattr(error, "__notes__", ())]), stacklevel=1)

    def forked(self) -> None:
        """In a forked child: let its copy of the training alone. Run, threads and files are the parent's."""
        self._closed = True
        self._detach()

    def _begin_at_once(self) -> None:
        try:
            self._detach = self._loop.attach(self)
            self._take(self._loop.step())
            self._pending.settle()
        except BaseException as error:
            self._detach()
            self._end()
            if isinstance(error, OSError):
                raise SetupError(f"the first step can't be written to {self.history}: {error}") from error
            raise

    def _try(self, step: int, *, moment: TransientState | None = None) -> None:
        try:
            self._take(step, moment=moment)
        except Exception as error:  # noqa: BLE001 - a provider of the user's may raise anything, and no snapshot ends a training
            self._publisher.failed(step, error)
            self._failures.warn()

    def _take(self, step: int, *, moment: TransientState | None = None) -> None:
        self._pending.release()
        self.settled()
        if self._publisher.pending() >= MAX_PENDING:
            if self._on_full == "skip":
                self._stats.skipped += 1
                self._run.journal.event("skipped", step, reason=f"{MAX_PENDING} snapshots were still being written")
                return
            self._publisher.wait_below(MAX_PENDING)
        if moment is not None:
            self._late.require_still(moment)
        resting = self._publisher.resting
        snapshot = Snapshot.start(
            self._source, self._writer, self._run, step, check=self._check, resting=resting, moment=moment
        )
        self._last = step
        self._late.forget()
        self._pending.add(snapshot)
        self._publisher.submit(snapshot)

    def _close(self, *, capture_last: bool) -> None:
        if self._closed:
            return
        self._closed = True
        # What was warned of already must not end a script whose training is over.
        self._failures.forget_warned()
        try:
            # After an exception inside an update the state is half new: there is no step to capture.
            if capture_last and not self._updating:
                self._capture_last()
            self.settled()
            self._pending.release()
        finally:
            self._detach()
            self._end()
        self._failures.raise_all()

    def _capture_last(self) -> None:
        step = self._loop.step()
        if step == self._last:
            return
        moment = self._late.of(step)
        if moment is not None and moment.weights.changed():
            # Weights that were loaded for an evaluation, or half an update: no step at all, and no failure either.
            self._late.say_not_captured(moment)
            return
        self._try(step, moment=moment)
        self._pending.settle()

    def _end(self) -> None:
        self._closed = True
        self._publisher.close()
        self._source.end(self._writer)
        self._writer.close()
        # A journal that can't be written is among the publisher's failures already; the lock is let go either way.
        with contextlib.suppress(OSError):
            self._run.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SetupError(f"the session of run {self.run} is closed: call capture.enable again")


def _leave_child_alone() -> None:
    for session in list(_open):
        session.forked()


os.register_at_fork(after_in_child=_leave_child_alone)
