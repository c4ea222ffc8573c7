"""SIGTERM takes a last snapshot within a limit of seconds, and then does what it would have done without a session.

The handler runs in the main thread between any two instructions. Where the state is no step's, because an update is
under way, or where this project's own code is interrupted, whose locks the snapshot needs, it comes back a moment
later. The same comes when the limit is over: whatever it then interrupts is left by an exception.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from catalog.errors import SetupError

__all__ = ["LastSnapshotOnSigterm", "LimitIsOverError"]

_RETRY_S = 0.02
_OURS = ("capture", "catalog", "native")


class LimitIsOverError(KeyboardInterrupt):
    """The limit is over. It leaves every wait as Ctrl-C does."""


class LastSnapshotOnSigterm:
    """The handler of one session, from its construction until `remove`. SetupError outside the main thread.

    may_take: called to ask whether the state is a step's now
    take: captures the step and returns once it is committed; left by LimitIsOverError
    """

    def __init__(
        self,
        limit_s: float,
        *,
        may_take: Callable[[], bool],
        take: Callable[[], None],
    ) -> None:
        self._limit_s = limit_s
        self._may_take = may_take
        self._take = take
        self._process = os.getpid()
        self._deadline: float | None = None
        self._taking = False
        try:
            self._former = signal.signal(signal.SIGTERM, self._handle)
        except ValueError as error:
            raise SetupError(
                "sigterm_limit_s: only the main thread may handle signals: enable the session there"
            ) from error

    def remove(self) -> None:
        """Put the former handler back, unless another has been installed since. Idempotent."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            # None: a handler that was not installed from Python, which can't be put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._pass_on(number, frame)
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._limit_s
        over = now >= self._deadline
        if self._taking:
            # The signal has come again, from outside or at the limit, while the snapshot is being taken.
            if over:
                raise LimitIsOverError
            return
        if not over and (not self._may_take() or _is_ours(frame)):
            _again(_RETRY_S)
            return
        self._taking = True
        if not over:
            again = _again(self._deadline - now)
            with contextlib.suppress(LimitIsOverError):
                self._take()
            again.cancel()
        self._taking, self._deadline = False, None
        self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._former):
            self._former(number, frame)
        elif self._former != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _again(seconds: float) -> threading.Timer:
    """Let the signal come once more in so many seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


def _is_ours(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
            return True
        frame = frame.f_back
    return False
