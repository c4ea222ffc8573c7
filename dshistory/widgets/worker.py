"""A worker thread for long tasks beside the kernel; it exists only while there is something to do.

Tasks have topics. Only the newest task of a topic runs: it replaces a waiting one. `first` runs tasks before all
others, and interrupts the running task at its next report of progress: what the user chose last is shown first. An
interrupted task of another topic runs again later, so that in the end every topic shows its newest task.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextvars import Context

from catalog.errors import HistoryError
from dshistory.display.progress import listening

__all__ = ["Worker"]

Task = Callable[[], None]


class _InterruptedError(BaseException):
    """The running task is no longer wanted, or not yet. No error: what handles errors on its way must not see it."""


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter does: a daemon thread in the middle of a query must not outlive it."""
    for worker in list(_workers):
        worker.close()


class Worker:
    """Runs tasks one at a time.

    on_error: called with the topic of a task and the error that ended it; `wait` raises an error that is neither
        HistoryError nor OSError too
    progress: called with the share done of the running task, and with None when it is over

    Both are called in the worker's thread. The condition `_changed` guards what waits and what runs; the running task
    polls `_interrupted` without it, and `_failure` is set before the thread ends, which is what `wait` waits for.
    """

    def __init__(self, *, on_error: Callable[[str, Exception], None], progress: Callable[[float | None], None]) -> None:
        self._on_error, self._progress = on_error, progress
        self._changed = threading.Condition()
        self._waiting: dict[str, Task] = {}
        self._running: tuple[str, Task] | None = None
        self._interrupted = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        _workers.add(self)

    @property
    def is_me(self) -> bool:
        """True when the caller is a task of this worker."""
        return self._thread is threading.current_thread()

    def first(self, tasks: Mapping[str, Task]) -> None:
        """Run these tasks, one for each topic, in their order and before all others; ignored after `close`."""
        with self._changed:
            if self._closed:
                return
            later = dict(self._waiting)
            if self._running is not None and not self._interrupted:
                topic, task = self._running
                later = {topic: task} | later
                self._interrupted = True
            self._waiting = {**tasks, **{topic: task for topic, task in later.items() if topic not in tasks}}
            self._start()

    def later(self, tasks: Mapping[str, Task]) -> None:
        """Run these tasks, one for each topic, after all others; ignored after `close`.

        A task that waits keeps its place, and one that runs goes on: a history that grows all the time would otherwise
        never let long work end."""
        with self._changed:
            if not self._closed:
                self._waiting.update(tasks)
                self._start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False when the time is over first.

        Raises the error of a task that is neither HistoryError nor OSError, once."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._thread is None, None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return done

    def abandon(self) -> None:
        """Drop waiting tasks and end the running one at its next report of progress; does not wait."""
        with self._changed:
            self._closed = self._interrupted = True
            self._waiting.clear()

    def close(self) -> None:
        """Do as `abandon` does and wait until the thread has ended; called by a task, it does not wait."""
        self.abandon()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        if self._thread is None and self._waiting:
            # A fresh context: the task must not report to the caller's progress bar, nor print into its cell.
            self._thread = threading.Thread(
                target=Context().run, args=(self._run,), name="dshistory-explorer", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                if not self._waiting:
                    # Under the same lock as `first`: a task that comes now finds no thread and starts another.
                    self._thread = None
                    self._changed.notify_all()
                    return
                topic = next(iter(self._waiting))
                self._running = topic, self._waiting.pop(topic)
                self._interrupted = self._closed
            topic, task = self._running
            finished = self._do(topic, task)
            with self._changed:
                if finished and self._waiting.get(topic) is task:
                    del self._waiting[topic]  # it was to be interrupted, and came to its end before

    def _do(self, topic: str, task: Task) -> bool:
        """Run a task; return whether it came to its end, with or without an error."""
        finished = True
        try:
            with listening(self._on_progress):
                task()
        except _InterruptedError:
            finished = False
        except (HistoryError, OSError) as error:
            self._on_error(topic, error)
        except Exception as error:  # noqa: BLE001 - kept for `wait`, shown at once
            self._failure = error
            self._on_error(topic, error)
        self._progress(None)
        return finished

    def _on_progress(self, share: float) -> None:
        if self._interrupted:
            raise _InterruptedError
        self._progress(share)
