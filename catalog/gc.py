"""Garbage collection: removes the parts of checkpoints that killed sessions left unfinished.

Only runs without a live process are touched. Their locks are held meanwhile, so no process can begin to write there.
Each removed checkpoint is recorded in the run's journal first, so that queries still show it as incomplete.
"""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from catalog.disk.durable import is_temporary, sync_dir
from catalog.disk.locks import free_lock, try_lock
from catalog.format.journal import NO_RANK, Journal
from catalog.paths import HistoryPaths
from catalog.read.runs import runs, step_dirs
from catalog.records import CheckpointRef

__all__ = ["collect_garbage"]


def collect_garbage(paths: HistoryPaths) -> list[CheckpointRef]:
    """Delete the files of incomplete checkpoints, and temporary files, of all runs that no process writes; return these
    checkpoints. Committed checkpoints and live runs are never touched."""
    collected = []
    for facts in runs(paths):
        with _locked_run(paths, facts.run) as locked:
            if locked:
                collected += _collect_run(paths, facts.run)
    return collected


def _collect_run(paths: HistoryPaths, run: str) -> list[CheckpointRef]:
    steps = step_dirs(paths, run)
    uncommitted = [step for step in steps if not paths.marker(run, step).exists()]
    if uncommitted:
        # The record comes before the removal: after a kill in between, the next collection finds the folders again.
        journal = Journal(paths.journal_dir(run), run=run, writer=f"collector-{secrets.token_hex(4)}", rank=NO_RANK)
        for step in uncommitted:
            journal.event("collected", step)
        journal.flush()
    for step in uncommitted:
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
    return [CheckpointRef(run, step) for step in uncommitted]


def _remove_temporaries(folder: Path) -> None:
    for path in [path for path in folder.iterdir() if is_temporary(path.name)]:
        path.unlink()
    sync_dir(folder)


@contextmanager
def _locked_run(paths: HistoryPaths, run: str) -> Iterator[bool]:
    """Lock every rank of a run until the end of the body. Yields False when a rank is alive."""
    with ExitStack() as held:
        folder = paths.locks_dir(run)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            lock = try_lock(path)
            if lock is None:
                yield False
                return
            held.callback(free_lock, lock)
        yield True
