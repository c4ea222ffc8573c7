"""A look at the history every so often: whoever watches is told when there is something new, from a thread that does nothing else.

What is looked at are names and sizes in the run's folders, not what is in the files: a look costs next to nothing.
"""

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from catalog.errors import HistoryError, SetupError
from catalog.history import History

__all__ = ["Watcher"]


class Watcher:
    """Calls `told` (held weakly: a bound method) whenever a run has new checkpoints, statistics or metrics, until `close`."""

    def __init__(self, history: History, run: str | None, told: Callable[[], None], *, seconds: float) -> None:
        if not seconds > 0:
            raise SetupError(f"watch: seconds must be more than 0, not {seconds}")
        self._history, self._run, self._seconds = history, run, seconds
        self._told = weakref.WeakMethod(told)
        self._committed: dict[str, set[int]] = {}
        self._seen = self._look()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dshistory-watch", daemon=True)

    def start(self) -> None:
        """Begin; what is new since the watcher was made counts."""
        self._thread.start()

    def abandon(self) -> None:
        """Stop soon, without waiting for that."""
        self._stop.set()

    def close(self) -> None:
        """Stop; no thread is left."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            seen, before = self._look(), self._seen
            self._seen = seen
            if seen != before and not self._tell():
                return

    def _tell(self) -> bool:
        """False when nobody is there any more."""
        told = self._told()
        if told is not None:
            told()
        return told is not None

    def _look(self) -> Any:
        """Something that differs when there is something new; what is wrong with the history is for others to say."""
        try:
            run = self._run or self._history.current_run()
            paths = self._history.paths
            there = self._history.step_dirs(run)
            committed = self._committed.setdefault(run, set())
            committed |= {step for step in there if step not in committed and paths.marker(run, step).exists()}
            committed &= set(there)
            return run, frozenset(committed), _files(paths.statistics_dir(run)), _files(paths.journal_dir(run))
        except (HistoryError, OSError) as error:
            return str(error)


def _files(folder: Path) -> frozenset[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            return frozenset((entry.name, entry.stat().st_size) for entry in entries)
    except FileNotFoundError:
        return frozenset()
