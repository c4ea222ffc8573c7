"""Polls a history in a thread of its own and calls back when it has something new.

A poll lists names and sizes in the run's folders and opens no file, so it costs next to nothing beside a training.
Polling works where notifications of the file system do not: on the network file systems that clusters write to.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from catalog.errors import HistoryError, SetupError
from catalog.history import History
from catalog.paths import HistoryPaths

__all__ = ["Watcher"]


class Watcher:
    """Calls `on_change` whenever a run has new checkpoints, statistics or metrics, until `close`.

    `on_change` must be a bound method. It is held weakly: the watcher ends, rather than keep its object alive. It runs
    in the watcher's thread."""

    def __init__(self, history: History, run: str | None, on_change: Callable[[], None], *, seconds: float) -> None:
        if not seconds > 0:
            raise SetupError(f"watch: seconds must be more than 0, not {seconds}")
        self._history, self._run, self._seconds = history, run, seconds
        self._on_change = weakref.WeakMethod(on_change)
        self._committed: dict[str, set[int]] = {}
        self._seen = self._snapshot()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dshistory-watch", daemon=True)

    def start(self) -> None:
        """Start; also reports changes since the watcher was constructed."""
        self._thread.start()

    def abandon(self) -> None:
        """Stop soon; does not wait for the thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self._stop.set()
        # `on_change` itself may close the watcher: a thread cannot wait for itself.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            seen, before = self._snapshot(), self._seen
            # Remembered before the call: a change that arrives during it is then seen by the next poll.
            self._seen = seen
            if seen != before and not self._notify():
                return

    def _notify(self) -> bool:
        """Call back; False when the object of the callback is gone."""
        on_change = self._on_change()
        if on_change is not None:
            on_change()
        return on_change is not None

    def _snapshot(self) -> Any:
        """Return a value that differs when the history has something new.

        An error is such a value too: whoever is called back then meets it and can report it."""
        try:
            run = self._run or self._history.current_run()
            paths = self._history.paths
            there = self._history.step_dirs(run)
            committed = self._committed.setdefault(run, set())
            # A marker never changes: a step that was seen committed is not looked up again.
            committed |= {step for step in there if step not in committed and _has_marker(paths, run, step)}
            committed &= set(there)
            return run, frozenset(committed), _files(paths.statistics_dir(run)), _files(paths.journal_dir(run))
        except (HistoryError, OSError) as error:
            return str(error)


def _has_marker(paths: HistoryPaths, run: str, step: int) -> bool:
    # From the listing: a network file system may go on to say for a while that a file is not there, once it was asked
    # for it too early; and a marker that is a link to nothing is new as well, which `log` then names.
    try:
        return paths.marker(run, step).name in os.listdir(paths.step_dir(run, step))
    except FileNotFoundError:
        return False


def _files(folder: Path) -> frozenset[tuple[str, int]]:
    found = set()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            # A segment that its writer merges is gone at any time.
            with suppress(FileNotFoundError):
                found.add((entry.name, entry.stat().st_size))
    return frozenset(found)
