"""A run being captured, as the user sees it.

The training thread plans, starts and releases snapshots (`step_events`); the committer's thread does the rest. Nothing
that goes wrong with a snapshot reaches the training: a failure is a warning at the next step, an event in the journal,
and a SnapshotError from `wait` and `close`.
"""

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

import native
from capture.exit_handler import call_at_exit
from capture.loops.interface import Loop
from capture.session.committer import Committer
from capture.session.step_events import StepEvents
from capture.session.user_records import checked_metrics, checked_tag
from capture.snapshot.change_detector import Check
from capture.snapshot.failures import Failures
from capture.snapshot.state_listing import StateListing
from catalog.errors import SetupError, SnapshotError
from catalog.run_writer import RunWriter

__all__ = ["Session", "SessionStats", "close_at_exit"]

_open: weakref.WeakSet["Session"] = weakref.WeakSet()

_COMMIT_POLL_S = 0.002
_COMMIT_PATIENCE_S = 30.0


@dataclass(slots=True)
class SessionStats:
    """The cost of capturing so far. Seconds of the training thread, all waits included; bytes of this rank's files, and
    of the state that was unchanged and is referred to in earlier files.
    """

    snapshots: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    unchanged_bytes: int = 0
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
        every: int,
        on_full: Literal["wait", "skip"],
        check: Check = "versions",
        stats_every: int = 1,
    ) -> None:
        self._loop = loop
        self._listing = listing
        self._run = run
        self._writer = writer
        self._every = every
        self._committer = Committer(run, stats_every=stats_every)
        self._failures = Failures(self._committer.take_failures)
        self._events = StepEvents(
            loop,
            listing,
            run=run,
            writer=writer,
            committer=self._committer,
            failures=self._failures,
            every=every,
            on_full=on_full,
            check=check,
            close=self.close,
        )
        self._closed = False
        self._detach: Callable[[], None] = lambda: None
        _open.add(self)
        self._begin_at_once()

    def __repr__(self) -> str:
        captured = len(self._committer.figures())
        interval = "every step" if self._every == 1 else f"every {self._every} steps"
        state = "closed" if self._closed else "open"
        return f"<Session: run {self.run} in {self.history}, {interval}, {captured} captured so far, {state}>"

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
        figures = self._committer.figures()
        return SessionStats(
            snapshots=len(figures),
            skipped=self._events.skipped,
            failed=self._failures.count,
            bytes=sum(int(item["file_bytes"]) for item in figures),
            unchanged_bytes=sum(int(item["unchanged_bytes"]) for item in figures),
            stall_s=sum(self._events.stalls_s),
            write_s=sum(float(item["write_s"]) for item in figures),
            stalls_s=list(self._events.stalls_s),
        )

    def snapshot(self) -> int:
        """Capture the step that has just ended, whether due or not; returns its number. A captured step is not captured
        again. SnapshotError when its state has changed since.
        """
        self._require_open()
        return self._events.snapshot_now()

    def log(self, **metrics: float | torch.Tensor) -> None:
        """Record metrics of the step that has just ended; one-element tensors are read off the training thread.
        SetupError for anything but real numbers.
        """
        self._require_open()
        self._committer.metrics(self._loop.step(), checked_metrics(metrics))

    def tag(self, name: str, step: int | None = None) -> None:
        """Give a step (default: the one that has just ended) a name that `restore` and `diff` take. SetupError for a
        name that would read as a step.
        """
        self._require_open()
        self._run.journal.tag(*checked_tag(name, self._loop.step() if step is None else step))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every snapshot started so far is committed. SnapshotError when one failed, or when the time is
        over. Returns at once when the session is closed: `close` has reported every failure. To be called when all that
        belongs to the step has its value, the scheduler's too.

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

    @contextlib.contextmanager
    def modify(self) -> Iterator[None]:
        """Wrap edits of captured state between steps: pending snapshots are made safe first."""
        self._events.before_access("modify")
        try:
            yield
        finally:
            self._events.layout_changed()

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

    def _begin_at_once(self) -> None:
        try:
            self._detach = self._loop.attach(self._events)
            self._events.begin()
        except BaseException as error:
            self._detach()
            self._end()
            if isinstance(error, OSError):
                raise SetupError(f"the first step can't be written to {self.history}: {error}") from error
            raise

    def _close(self, *, capture_last: bool) -> None:
        if self._closed:
            return
        self._closed = True
        # A failure that was warned of already must not end a script whose training is over.
        self._failures.forget_warned()
        try:
            if capture_last:
                self._events.capture_last()
            self._events.current.finalize_objects()
            self._events.current.release()
        finally:
            self._detach()
            self._end()
        self._failures.raise_all()

    def _end(self) -> None:
        self._closed = True
        self._committer.close()
        self._listing.end(self._writer)
        self._writer.close()
        # A journal that can't be written is among the committer's failures already; the lock is released either way.
        with contextlib.suppress(OSError):
            self._run.close()

    def _require_open(self) -> None:
        if self._closed:
            raise SetupError(f"the session of run {self.run} is closed: call capture.enable again")


def close_at_exit(session: Session) -> None:
    """Close `session` when the interpreter exits; the last step is captured unless the script has failed."""
    call_at_exit(session, lambda alive: alive._close(capture_last=not hasattr(sys, "last_value")))


def _leave_to_parent() -> None:
    """In a forked child: let its copy of the training alone. Runs, threads and files are the parent's."""
    for session in list(_open):
        session._closed = True
        session._detach()


os.register_at_fork(after_in_child=_leave_to_parent)
