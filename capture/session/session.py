"""A run being captured, as the user sees it.

The training thread plans, starts and releases snapshots (`step_events`); the committer's thread does the rest. Nothing
that goes wrong with a snapshot reaches the training: a failure is a warning at the next step or at `close`, an event in
the journal, an entry of `failures`, and a SnapshotError from `wait`. Only a strict session raises in `close` too.
"""

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import torch

import native
from capture.background_thread import BackgroundThread
from capture.exit_handler import call_at_exit
from capture.loops.interface import Loop
from capture.loops.module_hooks import install
from capture.publishing.committer import Committer
from capture.redo_log.recorder import RedoRecorder
from capture.session.options import SessionOptions
from capture.session.sigterm import LastSnapshotOnSigterm
from capture.session.step_events import Observer, StepEvents
from capture.session.user_records import checked_metrics, checked_tag
from capture.snapshot.failures import Failures
from capture.snapshot.state_listing import StateListing
from capture.user_warning import warn_user
from catalog.errors import SetupError, SnapshotError
from catalog.records import CheckpointRef
from catalog.run_writer import RunWriter

__all__ = ["Session", "SessionStats", "close_at_exit", "close_may_publish"]

_open: weakref.WeakSet["Session"] = weakref.WeakSet()

_COMMIT_POLL_S = 0.002
_COMMIT_PATIENCE_S = 30.0
_GIVE_UP_LIMIT_S = 10.0


@dataclass(slots=True)
class SessionStats:
    """The cost of capturing so far. Seconds of the training thread, all waits included; bytes of this rank's files, and
    of the state that was unchanged and is referred to in earlier files, and of the low-precision weights that are their
    masters, rounded, and not stored. `without_statistics`: the checkpoints that
    `dshistory analyze` would have to compute now. `compacted`, `saved_bytes`: the checkpoints that were packed beside
    the training, and the bytes by which they take less: of all ranks, counted by the first. `stalls_s` are the latest
    steps' seconds.
    """

    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    unchanged_bytes: int = 0
    derived_bytes: int = 0
    without_statistics: int = 0
    compacted: int = 0
    saved_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list, repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Throughput of the writer while it wrote."""
        return self.bytes / self.write_s if self.write_s else 0.0


class Session:
    """The capture of one run, from `capture.enable` to `close`. Its methods are for the training thread.

    A context manager: leaving it closes the session; after an exception the last step is not captured, because it may
    be half done.
    """

    def __init__(
        self,
        loop: Loop,
        listing: StateListing,
        *,
        run: RunWriter,
        writer: native.Writer,
        options: SessionOptions,
        observer: Observer | None = None,
        redo: RedoRecorder | None = None,
        resumed_from: CheckpointRef | None = None,
    ) -> None:
        self._loop = loop
        self._resumed_from = resumed_from
        self._listing = listing
        self._run = run
        self._writer = writer
        self._options = options
        self._committer = Committer(run, stats_every=options.stats_every, keep=options.keep, compact=options.compact)
        self._failures = Failures(self._committer.take_failures)
        self._events = StepEvents(
            loop,
            listing,
            run=run,
            writer=writer,
            committer=self._committer,
            failures=self._failures,
            options=options,
            close=self.close,
            observer=observer,
            redo=redo,
        )
        self._observer = observer
        self._redo = redo
        self._closed = False
        self._ended = False
        self._interrupted = False
        self._detach: Callable[[], None] = lambda: None
        _open.add(self)
        self._sigterm: LastSnapshotOnSigterm | None = None
        self._begin_at_once()
        if options.sigterm_limit_s is not None:
            self._handle_sigterm(options.sigterm_limit_s)

    def __repr__(self) -> str:
        captured = int(self._committer.figures()["snapshots"])
        interval = "every step" if self._options.every == 1 else f"every {self._options.every} steps"
        state = "closed" if self._closed else "open"
        begins = "" if self._resumed_from is None else f"goes on from {self._resumed_from}, "
        return f"<Session: run {self.run} in {self.history}, {begins}{interval}, {captured} captured so far, {state}>"

    @property
    def run(self) -> str:
        """The run's id."""
        return self._run.run

    @property
    def history(self) -> Path:
        """The history's folder."""
        return self._run.paths.root

    @property
    def resumed_from(self) -> CheckpointRef | None:
        """The checkpoint that this run goes on from: the one that `resume="auto"` chose, or that `capture.restore` put
        back before `enable`, in any history. None for a run that starts fresh.
        """
        return self._resumed_from

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, those before a resume included, and those that were skipped: a script
        goes on with `for step in range(session.step, total)`.
        """
        return self._loop.step()

    @property
    def is_open(self) -> bool:
        """True until `close` has begun."""
        return not self._closed

    @property
    def stats(self) -> SessionStats:
        """The cost so far."""
        figures = self._committer.figures()
        compacted, saved_bytes = self._committer.compacted()
        return SessionStats(
            snapshots=int(figures["snapshots"]),
            skipped=self._events.skipped,
            failed=len(self._failures.all()),
            bytes=int(figures["file_bytes"]),
            unchanged_bytes=int(figures["unchanged_bytes"]),
            derived_bytes=int(figures["derived_bytes"]),
            without_statistics=self._committer.without_statistics(),
            compacted=compacted,
            saved_bytes=saved_bytes,
            stall_s=self._events.stall_s,
            write_s=float(figures["write_s"]),
            stalls_s=list(self._events.stalls_s),
        )

    @property
    def failures(self) -> list[SnapshotError]:
        """Every failure so far, in order, whether a warning or an error has reported it or not; also after `close`."""
        return self._failures.all()

    def snapshot(self) -> int:
        """Capture the step that has just ended, whether due or not; returns its number. A captured step is not captured
        again. SnapshotError when its state has changed since.
        """
        self._require_open()
        return self._events.snapshot_now()

    def log(
        self, metrics: Mapping[str, float | torch.Tensor] = MappingProxyType({}), /, **named: float | torch.Tensor
    ) -> None:
        """Record metrics of the step that has just ended, as `log(loss=0.5)` or `log({"val/loss": 0.5})`; one-element
        tensors are read off the training thread. SetupError for anything but real numbers.
        """
        self._require_open()
        self._committer.metrics(self._loop.step(), checked_metrics(metrics, named))

    def tag(self, name: str, step: int | None = None) -> None:
        """Give a step (default: the one that has just ended) a name that `restore` and `diff` take. SetupError for a
        name that would read as a step. A name for a step that is not captured, and not due later, finds nothing, which
        a warning tells: call `snapshot` first.
        """
        self._require_open()
        text, number = checked_tag(name, self._loop.step() if step is None else step)
        if not (self._events.will_be_captured(number) or self._run.paths.step_dir(self.run, number).exists()):
            warn_user(
                f"tag {text!r}: step {number} is not captured, so the name finds nothing, unless it is the last step: "
                "call session.snapshot() before session.tag()"
            )
        self._run.journal.tag(text, number)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every snapshot started so far is committed. SnapshotError when one failed, or when the time is
        over. Returns at once when the session is closed: `failures` has them all. To be called when all that belongs to
        the step has its value, the scheduler's too.

        Among several ranks it also waits for the others' parts, at most half a minute without `timeout_s`.
        """
        if self._closed:
            return
        deadline = time.monotonic() + (_COMMIT_PATIENCE_S if timeout_s is None else timeout_s)
        self._events.current.finalize_objects()
        if not self._committer.wait_below(1, timeout_s=timeout_s):
            raise SnapshotError(
                f"run {self.run}: {self._committer.pending()} snapshots still pending after {timeout_s} s"
            )
        self._failures.raise_all()
        last = self._committer.last_published()
        while last is not None and not self._run.paths.marker(self.run, last).exists():
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"step {last} of run {self.run} is not committed: the part of another rank is missing"
                )
            time.sleep(_COMMIT_POLL_S)

    def modify(self) -> contextlib.AbstractContextManager[None]:
        """Wrap edits of captured state between steps, as in `with session.modify():`. The checkpoint of the step that
        has just ended is the state after all edits before the next training forward, with all objects as they are then:
        the state that the next step starts from. Edits belong behind the step in the loop, so that a training that is
        restored does not repeat them.

        An edit after that forward, before the update, is part of the next step. A step that is final already because of
        `wait`, `snapshot` or a load stays as it was: a warning and the event `edited_after_commit` in the journal say
        so.
        On another thread than the training's this only waits until nothing is read.
        """
        return contextlib.nullcontext() if self._closed else self._events.editing("modify")

    def close(self) -> None:
        """Capture the last step, finish everything, let the loop go. Idempotent.

        After the last write statistics are computed for at most a second more; `stats.without_statistics` are left to
        `dshistory analyze`, which is a message of the log (INFO) and an event of the journal.

        A snapshot that failed, on a full disk for example, is a warning and is in `failures`, so that a script whose
        training is over still saves its model. With `strict=True`: SnapshotError for what no `wait` has raised.

        Ctrl-C leaves at once and drops nothing: the snapshots go on in the background, and a second call waits for them
        again. When the process ends before that, they are given up.
        """
        self._close(capture_last=True)
        if self._options.strict:
            self._failures.raise_all()
        self._failures.warn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._close(capture_last=False)
        self._failures.warn()

    def _begin_at_once(self) -> None:
        try:
            detach = self._loop.attach(self._events)
            self._detach = detach if self._redo is None else install([self._redo.attach(), detach])
            self._events.begin()
        except BaseException as error:
            self._detach()
            self._end()
            if isinstance(error, OSError):
                raise SetupError(f"the first step can't be written to {self.history}: {error}") from error
            raise

    def _handle_sigterm(self, limit_s: float) -> None:
        # The handler must not keep the session alive.
        reference = weakref.ref(self)

        def may_take() -> bool:
            alive = reference()
            return alive is None or alive._closed or not alive._events.is_being_written

        def take() -> None:
            alive = reference()
            if alive is not None and not alive._closed:
                alive._take_last(limit_s)

        try:
            self._sigterm = LastSnapshotOnSigterm(limit_s, may_take=may_take, take=take)
        except SetupError:
            self._close(capture_last=False)
            raise

    def _take_last(self, limit_s: float) -> None:
        try:
            self._events.capture_last()
            self._events.current.finalize_objects()
            if self._redo is not None:
                self._redo.write_out()
            self.wait(limit_s)
        except SnapshotError as error:
            warn_user(f"SIGTERM: {error}")
        except KeyboardInterrupt:
            # Nobody is to wait longer than the limit, at the exit neither.
            self._interrupted = True
            raise

    def _close(self, *, capture_last: bool) -> None:
        try:
            if not self._closed:
                self._finish_step(capture_last=capture_last)
            if not self._ended:
                self._end()
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    def _finish_step(self, *, capture_last: bool) -> None:
        """Capture the last step if wanted, pass the barrier, and let the loop go."""
        self._closed = True
        if self._committer.retention is not None:
            self._committer.retention.is_ending = True
        try:
            if capture_last:
                self._events.capture_last()
            else:
                self._events.give_up_half_edited()
            self._events.current.finalize_objects()
            self._events.current.release()
        except KeyboardInterrupt:
            # The barrier is not passed, so the loop must not be let go: the session is open as before.
            self._closed = False
            raise
        except BaseException:
            self._detach()
            self._end()
            raise
        self._detach()

    def _give_up(self) -> None:
        """Let go of everything without waiting for what is not committed. Only what a device is reading or syncing is
        waited for, and not for ever: a disk that does not answer must not keep the process from its exit.
        """
        self._closed = True
        self._detach()

        def give_up() -> None:
            if self._redo is not None:
                self._redo.give_up()
            self._committer.give_up()
            self._end()

        if not BackgroundThread(give_up, name="dshistory-give-up").wait(_GIVE_UP_LIMIT_S):
            warn_user(
                f"run {self.run}: the process ends while a write to {self.history} is under way, which has not ended "
                f"for {_GIVE_UP_LIMIT_S:g} s; what is not committed is not in the history"
            )

    def _end(self) -> None:
        self._closed = True
        if self._observer is not None:
            self._observer.end()
        if self._redo is not None:
            self._redo.close()
        self._committer.close()
        self._listing.end(self._writer)
        self._writer.close()
        if self._run.rank == 0 and not self._interrupted:
            self._run.journal.event("closed", None)
        # A journal that can't be written is among the committer's failures already; the lock is released either way.
        with contextlib.suppress(OSError):
            self._run.close()
        self._ended = True
        if self._sigterm is not None and threading.current_thread() is threading.main_thread():
            self._sigterm.remove()

    def _require_open(self) -> None:
        if self._closed:
            raise SetupError(f"the session of run {self.run} is closed: call capture.enable again")


def close_at_exit(session: Session) -> None:
    """Close `session` when the interpreter exits; the last step is captured unless the script has failed."""
    call_at_exit(session, _close_after_script)


def close_may_publish(session: Session, step: int) -> bool:
    """Return whether `close` may bring a step into the history: the one that has just ended, or one of a redo log."""
    return step == session.step or (session._redo is not None and step < session.step)


def _close_after_script(session: Session) -> None:
    if session._interrupted:
        # Whoever left `close` by Ctrl-C must not be made to wait at the exit.
        session._give_up()
    else:
        try:
            session._close(capture_last=not hasattr(sys, "last_value"))
        except KeyboardInterrupt:
            session._give_up()
    session._failures.warn()


def _leave_to_parent() -> None:
    """In a forked child: let its copy of the training alone. Runs, threads and files are the parent's."""
    for session in list(_open):
        session._closed = session._ended = True
        session._detach()


os.register_at_fork(after_in_child=_leave_to_parent)
