"""Long work beside the kernel: one thread at a time, there only while there is something to do.

Tasks have topics. A task takes the place of one of its topic that still waits, and ends one of its topic that runs, at its next
word of progress: what is shown is the newest wish, not all of them one after the other.
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
    """A thread that is in the middle of a query must not outlive the interpreter."""
    for worker in list(_workers):
        worker.close()


class Worker:
    """Runs tasks one after the other, in the order in which they were asked for.

    told: called with the topic of a task and the error that ended it; those that are neither HistoryError nor OSError `wait`
        raises too
    progress: called with the share done of the running task, and with None when it is over
    """

    def __init__(self, *, told: Callable[[str, Exception], None], progress: Callable[[float | None], None]) -> None:
        self._told, self._progress = told, progress
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
        """Whether the caller is a task of this worker."""
        return self._thread is threading.current_thread()

    def submit(self, topic: str, task: Task) -> None:
        """Have the task run soon, in place of what else the topic has; nothing after `close`."""
        with self._changed:
            if self._closed:
                return
            self._waiting.pop(topic, None)
            self._waiting[topic] = task
            self._unwanted |= self._running == topic
            if self._thread is None:
                # An own context: neither this thread's progress bar nor what it prints to belongs to the task.
                self._thread = threading.Thread(
                    target=Context().run, args=(self._run,), name="dshistory-explorer", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do; False when the time is over first. Raises the error of a task that was none of ours to
        refuse."""
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
        """Drop what waits, and end what runs at its next word of progress, without waiting for that."""
        with self._changed:
            self._closed = self._unwanted = True
            self._waiting.clear()

    def close(self) -> None:
        """As `abandon`, and wait until no thread is left; a task itself may call it, and does not wait."""
        self.abandon()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
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
            with listening(self._heard):
                task()
        except _SupersededError:
            pass
        except (HistoryError, OSError) as error:
            self._told(topic, error)
        except Exception as error:  # noqa: BLE001 - kept for `wait`, shown at once
            self._failure = error
            self._told(topic, error)
        self._progress(None)

    def _heard(self, share: float) -> None:
        if self._unwanted:
            raise _SupersededError
        self._progress(share)
