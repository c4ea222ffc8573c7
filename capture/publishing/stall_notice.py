"""Says on stderr when the background thread of a session has been at one thing for long: a disk that does not answer.

There is no limit after which a write is taken for lost. The device may still read the memory, and a file server that is
away for minutes comes back; so the barrier, `wait` and `close` go on waiting, and Ctrl-C leaves each of them.
"""

import sys
import threading
from collections.abc import Callable

from capture.background_thread import BackgroundThread

__all__ = ["StallNotice"]

SAY_EVERY_S = 60.0


class StallNotice:
    """Looks every `SAY_EVERY_S` seconds, until `end`, whether `under_way` gives the same number as before; None when
    nothing is under way. The other value is what the line on stderr calls it.
    """

    def __init__(self, under_way: Callable[[], tuple[int, str] | None]) -> None:
        self._under_way = under_way
        self._ending = threading.Event()
        self._thread = BackgroundThread(self._watch, name="dshistory-stall-notice")

    def end(self) -> None:
        """End the thread."""
        self._ending.set()
        self._thread.wait()

    def _watch(self) -> None:
        before, seconds = None, 0.0
        while not self._ending.wait(SAY_EVERY_S):
            now = self._under_way()
            seconds = seconds + SAY_EVERY_S if now is not None and now == before else 0.0
            before = now
            if now is not None and seconds:
                sys.stderr.write(
                    f"capture: {now[1]} has been under way for more than {seconds:g} s: does its disk answer? An "
                    "update, `wait` and `close` wait for it, and go on when it does; Ctrl-C leaves the wait.\n"
                )
