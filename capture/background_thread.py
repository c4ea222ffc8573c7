"""A background thread whose end can be waited for, also by a main thread that is interrupted while it waits.

`threading.Thread.join` is no such wait: when Ctrl-C leaves it, Python takes the thread for ended, and the next `join`
returns at once although the thread runs on.
"""

import threading
from collections.abc import Callable

__all__ = ["BackgroundThread"]


class BackgroundThread:
    """Runs `target` in a daemon thread from its construction on.

    A daemon, because the interpreter joins all other threads before it runs the exit handlers that end these.
    """

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target = target
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True once `wait` would return at once."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return once the thread has ended, or the time is over: False then. Left by an exception, such as
        KeyboardInterrupt, it can be called again.
        """
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()
