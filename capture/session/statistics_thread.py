"""The thread that computes the statistics of what a session has committed, whenever there is time.

It reads back what is on the disk, at the lowest priority, and gives way to snapshots: what it can't keep up with is left to
`dshistory analyze`. What fails here costs statistics, never a checkpoint.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from catalog.format.statistics_file import StatisticsFile
from catalog.run_writer import RunWriter
from catalog.statistics.compute import analyze_part

__all__ = ["StatisticsThread"]

_CLOSE_PATIENCE_S = 5.0
_WAY_S = 1.0
"""So long it gives way to snapshots that are being written, before each batch."""

_LOOK_S = 0.5
"""How often it looks whether the other ranks have committed what waits for them."""

_MOST_WAITING = 16
"""Steps that wait; of a checkpoint that is never committed there is nothing to compute."""

_LOWEST_PRIORITY = 19


class StatisticsThread:
    """Of one rank's parts, the newest first. `every`: only of steps that are multiples of it; 0: of none. `wait_idle(seconds)`
    returns once no snapshot is being written, or the time is over.
    """

    def __init__(self, run: RunWriter, *, every: int, wait_idle: Callable[[float], object]) -> None:
        self._run = run
        self._every = every
        self._wait_idle = wait_idle
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._deadline: float | None = None
        self._done = False
        self._thread: threading.Thread | None = None

    def published(self, step: int) -> None:
        """This rank's part of the step is published; its checkpoint may not be committed yet."""
        if not self._every or step % self._every:
            return
        with self._changed:
            self._waiting = [*self._waiting, step][-_MOST_WAITING:]
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dshistory-analyst", daemon=True)
            self._thread.start()

    def close(self) -> bool:
        """Go on for a few seconds with what is waiting, and end; whether there are new statistics at all."""
        with self._changed:
            self._deadline = time.monotonic() + _CLOSE_PATIENCE_S
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        return self._done

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            # Of this thread, and of those that read for it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._deadline is not None)
                if not self._waiting or self._stopped():
                    return
                step = next(filter(self._committed, reversed(self._waiting)), None)
                if step is None:
                    self._changed.wait(_LOOK_S)
                    continue
                self._waiting.remove(step)
            self._analyze(step)

    def _committed(self, step: int) -> bool:
        return self._run.paths.marker(self._run.run, step).exists()

    def _analyze(self, step: int) -> None:
        run = self._run
        try:
            about = StatisticsFile(step, run.rank, run.world_size)
            self._done |= analyze_part(run.paths, run.run, about, stopped=self._give_way)
        except Exception as error:  # noqa: BLE001 - the checkpoint is safe; `dshistory analyze` tries again and says more
            run.journal.event("analysis_failed", step, reason=str(error))

    def _give_way(self) -> bool:
        self._wait_idle(_WAY_S)
        return self._stopped()

    def _stopped(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
