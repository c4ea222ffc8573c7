"""Registers what a session has committed in the index of its history, as often as the training can afford.

A checkpoint that waits for its registration loses nothing: queries see it. But each reader has to read it by itself,
and the session's end waits for those that are left. So the index takes a small share of a core, and a larger one while
many wait: steps that are captured many times a second would leave it further and further behind.
"""

import math
import time
from collections.abc import Callable

from catalog.run_writer import RunWriter

__all__ = ["Registration"]

_SHARE = 0.01
"""The index takes at most this share of a core,"""
_MANY = 32
_SHARE_OF_MANY = 0.25
"""and at most this one while so many checkpoints wait."""

_PATIENCE_S = 0.1


class Registration:
    """The registrations of one session. `begin` is told of each before it begins. For one thread at a time."""

    def __init__(self, run: RunWriter, *, begin: Callable[[str], None]) -> None:
        self._run = run
        self._begin = begin
        self._waiting = 0
        self._some_left = False
        """Whether the last registration found fewer than waited for it, most likely since the index was busy."""
        self._due_at = self._many_due_at = 0.0

    def committed(self) -> None:
        """Note that one more checkpoint waits."""
        self._waiting += 1

    def due_s(self) -> float:
        """Return the seconds until what waits is to be registered; infinity when nothing does."""
        if not self._waiting:
            return math.inf
        return (self._many_due_at if self._waiting >= _MANY else self._due_at) - time.monotonic()

    def register_when_due(self, *, at_once: bool = False) -> None:
        """Register what waits, unless the index has had its share of the time already."""
        if self.due_s() <= 0 or (at_once and (self._waiting or self._some_left)):
            self.register()

    def register(self) -> None:
        """Register whatever the index does not have. A failure is noted in the run's journal."""
        # Imported here, in the background, because it imports DuckDB: `enable` does not wait for that.
        from catalog.index import index

        waiting, self._waiting = self._waiting, 0
        self._some_left = True
        self._begin("the registration of checkpoints")
        began = time.thread_time()
        try:
            self._some_left = index.register(self._run.paths, patience_s=_PATIENCE_S) < waiting
        except Exception as error:  # noqa: BLE001 - whatever ails the index must not end the thread others wait for
            # The index is derived: the checkpoint is safe, and the next registration or `reindex` includes this one.
            self._run.journal.event("registration_failed", None, reason=str(error))
        took = time.thread_time() - began
        self._due_at = time.monotonic() + took / _SHARE
        self._many_due_at = time.monotonic() + took / _SHARE_OF_MANY
