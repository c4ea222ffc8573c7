"""What killed sessions leave behind: parts of checkpoints that never came to be.

Only runs that nobody holds are touched; their locks are held meanwhile, so that nobody can begin to. Every
checkpoint collected is recorded in the run's journal, so that it is known, and not looked at again.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from catalog.disk.durable import is_temporary, sync_dir
from catalog.disk.locks import free_lock, try_lock
from catalog.format.journal import NO_RANK, Journal
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef

__all__ = ["collect"]


def collect(history: History) -> list[CheckpointRef]:
    """Delete the files of incomplete checkpoints, and temporary files, of all runs that nobody holds; the checkpoints collected.
    Committed checkpoints and live runs are never touched."""
    collected = []
    for facts in history.runs():
        with _alone(history.paths, facts.run) as alone:
            if alone:
                collected += _collect_run(history.paths, facts.run, history.step_dirs(facts.run))
    return collected


def _collect_run(paths: HistoryPaths, run: str, steps: list[int]) -> list[CheckpointRef]:
    loose = [step for step in steps if not paths.marker(run, step).exists()]
    if loose:
        # First the record, then the deed: killed in between, the next collection finds the folders again.
        journal = Journal(paths.journal_dir(run), run=run, writer=f"collector-{secrets.token_hex(4)}", rank=NO_RANK)
        for step in loose:
            journal.event("collected", step)
        journal.flush()
    for step in loose:
        folder = paths.step_dir(run, step)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    for folder in (
        paths.run_dir(run),
        paths.steps_dir(run),
        paths.journal_dir(run),
        paths.statistics_dir(run),
        *(paths.step_dir(run, step) for step in steps),
    ):
        if folder.is_dir():
            _remove_temporaries(folder)
    return [CheckpointRef(run, step) for step in loose]


def _remove_temporaries(folder: Path) -> None:
    found = [path for path in folder.iterdir() if is_temporary(path.name)]
    for path in found:
        path.unlink()
    sync_dir(folder)


@contextmanager
def _alone(paths: HistoryPaths, run: str) -> Iterator[bool]:
    """Whether no rank of the run lives; until the end of the body none can begin to."""
    with ExitStack() as held:
        folder = paths.locks_dir(run)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            lock = try_lock(path)
            if lock is None:
                yield False
                return
            held.callback(free_lock, lock)
        yield True
