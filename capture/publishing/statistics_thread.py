"""The thread that computes the statistics of what a session has committed, whenever there is time.

It reads back the files on the disk, at the lowest priority, and gives way to snapshots: checkpoints that it can't keep
up with are left to `dshistory analyze`, which `close` says. A failure here costs statistics, never a checkpoint.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from capture.background_thread import BackgroundThread
from capture.exit_handler import call_at_exit
from catalog.format.statistics_file import StatisticsFile
from catalog.run_writer import RunWriter
from catalog.statistics.compute import analyze_part

__all__ = ["StatisticsThread"]

_CLOSE_PATIENCE_S = 0.5
"""The longest time for which `close` waits for statistics, on however busy a machine; with all else that it does after
the last write it stays within a second.
"""

_GIVE_WAY_S = 1.0
"""The longest wait, before each batch, for snapshots that are being written."""

_COMMIT_POLL_S = 0.5
"""The time between two looks whether the other ranks have published their parts of a waiting step."""

_MOST_WAITING = 16
"""The most steps that wait; the oldest are dropped, since they may never be committed."""

_LOWEST_PRIORITY = 19

_log = logging.getLogger(__name__)


class StatisticsThread:
    """Computes the statistics of one rank's parts, the newest first.

    every: only for steps that are multiples of it; 0: for none
    wait_idle: called with a number of seconds; returns once no snapshot is being written, or the time is over
    """

    def __init__(self, run: RunWriter, *, every: int, wait_idle: Callable[[float], object]) -> None:
        self._run = run
        self._every = every
        self._wait_idle = wait_idle
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._deadline: float | None = None
        self._patience_s = _CLOSE_PATIENCE_S
        self._wanted = self._done = 0
        self._publishing = self._closed = False
        self._thread: BackgroundThread | None = None
        # Before the session's own, so it is called after that.
        call_at_exit(self, StatisticsThread._outlive)

    def published(self, step: int) -> None:
        """Queue a step whose part of this rank is published; its checkpoint may not be committed yet."""
        if not self._every or step % self._every:
            return
        with self._changed:
            self._waiting = [*self._waiting, step][-_MOST_WAITING:]
            self._wanted += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = BackgroundThread(self._work, name="dshistory-statistics")

    def left(self) -> int:
        """Return how many of the published steps that are to have statistics have none yet."""
        with self._changed:
            return self._wanted - self._done

    def give_up(self) -> None:
        """Let `close` leave what is waiting to `dshistory analyze` at once."""
        self._patience_s = 0.0

    def close(self) -> bool:
        """Go on for half a second with the steps that wait, and end; return whether there are new statistics at
        all. What is left then is an event of the journal and a message of the log.

        Where no core is free, a batch that is being computed may outlast that time. Nobody waits for it but the end of
        the interpreter: the thread ends after it by itself, and publishes nothing.
        """
        with self._changed:
            self._deadline = time.monotonic() + self._patience_s
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.wait(self._patience_s)
        with self._changed:
            self._changed.wait_for(lambda: not self._publishing)
            self._closed = True
        left = self.left()
        if left:
            told = f"{left} of {self._wanted} checkpoints of rank {self._run.rank} have no statistics yet"
            self._run.journal.event("statistics_left", None, reason=told)
            _log.info("run %s: %s: dshistory analyze %s", self._run.run, told, self._run.paths.root)
        return self._done > 0

    def _outlive(self) -> None:
        """Let the thread end before the interpreter does, which would abort the process where a thread comes back to it
        from native code."""
        with self._changed:
            self._deadline = min(self._deadline or math.inf, time.monotonic())
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.wait()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            # Linux: the priority of this thread, which threads that it starts inherit.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._deadline is not None)
                if not self._waiting or self._stopped():
                    return
                self._forget_removed()
                step = next(filter(self._committed, reversed(self._waiting)), None)
                if step is None:
                    self._changed.wait(_COMMIT_POLL_S)
                    continue
                self._waiting.remove(step)
            self._analyze(step)

    def _forget_removed(self) -> None:
        """A checkpoint that was removed since is not to have statistics any more."""
        there = [step for step in self._waiting if self._run.paths.step_dir(self._run.run, step).is_dir()]
        self._wanted -= len(self._waiting) - len(there)
        self._waiting = there

    def _committed(self, step: int) -> bool:
        return self._run.paths.marker(self._run.run, step).exists()

    def _analyze(self, step: int) -> None:
        run, done, failure = self._run, False, None
        try:
            about = StatisticsFile(step, run.rank, run.world_size)
            done = analyze_part(run.paths, run.run, about, stopped=self._give_way, may_publish=self._begin_publishing)
        except Exception as error:  # noqa: BLE001 - the checkpoint is safe; `dshistory analyze` tries again and says more
            failure = error
        removed = not run.paths.step_dir(run.run, step).is_dir()
        with self._changed:
            self._publishing = False
            self._done += done
            self._wanted -= removed and not done
            self._changed.notify_all()
            if failure is not None and not removed and not self._closed:
                run.journal.event("analysis_failed", step, reason=str(failure))

    def _begin_publishing(self) -> bool:
        with self._changed:
            self._publishing = not self._closed
            return self._publishing

    def _give_way(self) -> bool:
        self._wait_idle(_GIVE_WAY_S)
        return self._stopped()

    def _stopped(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
