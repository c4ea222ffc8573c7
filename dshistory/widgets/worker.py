"""A worker thread for long tasks beside the kernel; it exists only while there is something to do.

Tasks have topics. A new task replaces a waiting one of its topic and ends a running one of its topic at its next report
of progress: so a slider that is dragged shows its last position, not all of them one after the other.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import Context

from catalog.errors import HistoryError
from dshistory.display.progress import listening

__all__ = ["Worker"]

Task = Callable[[], None]


class _SupersededError(Exception):
    """The running task is no longer wanted."""


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter does: a daemon thread in the middle of a query must not outlive it."""
    for worker in list(_workers):
        worker.close()


class Worker:
    """Runs tasks one after the other, in the order of their submission.

    on_error: called with the topic of a task and the error that ended it; `wait` raises an error that is neither
        HistoryError nor OSError too
    progress: called with the share done of the running task, and with None when it is over

    Both are called in the worker's thread. The condition `_changed` guards what waits and what runs; the running task
    polls `_unwanted` without it, and `_failure` is set before the thread ends, which is what `wait` waits for.
    """

    def __init__(self, *, on_error: Callable[[str, Exception], None], progress: Callable[[float | None], None]) -> None:
        self._on_error, self._progress = on_error, progress
        self._changed = threading.Condition()
        self._waiting: dict[str, Task] = {}
        self._running: str | None = None
        self._unwanted = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        _workers.add(self)

    @property
    def is_me(self) -> bool:
        """True when the caller is a task of this worker."""
        return self._thread is threading.current_thread()

    def submit(self, topic: str, task: Task) -> None:
        """Run the task soon, in place of others of its topic; ignored after `close`."""
        with self._changed:
            if self._closed:
                return
            self._waiting.pop(topic, None)
            self._waiting[topic] = task
            self._unwanted |= self._running == topic
            if self._thread is None:
                # A fresh context: the task must not report to the caller's progress bar, nor print into its cell.
                self._thread = threading.Thread(
                    target=Context().run, args=(self._run,), name="dshistory-explorer", daemon=True
                )
                self._thread.start()

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
            self._closed = self._unwanted = True
            self._waiting.clear()

    def close(self) -> None:
        """Do as `abandon` does and wait until the thread has ended; called by a task, it does not wait."""
        self.abandon()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    # Under the same lock as `submit`: a task that comes now finds no thread and starts another.
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._running = next(iter(self._waiting))
                task = self._waiting.pop(self._running)
                self._unwanted = self._closed
            self._do(self._running, task)
            with self._changed:
                self._running = None

    def _do(self, topic: str, task: Task) -> None:
        try:
            with listening(self._on_progress):
                task()
        except _SupersededError:
            pass
        except (HistoryError, OSError) as error:
            self._on_error(topic, error)
        except Exception as error:  # noqa: BLE001 - kept for `wait`, shown at once
            self._failure = error
            self._on_error(topic, error)
        self._progress(None)

    def _on_progress(self, share: float) -> None:
        if self._unwanted:
            raise _SupersededError
        self._progress(share)
