"""Removes this rank's parts of steps that can't be committed any more, because another rank has failed them.

A part may be removed only when no rank will ever publish a missing part of its step. Two observations prove that:
  1. A step that came later is committed. Every rank finishes its snapshots in the order in which they came, so a rank
     that has published its part of the later one has published its part of the earlier one, or never will. It need not
     have the greater number: a load may have counted the steps back.
  2. The journal of a rank says that it has failed the step. A session never begins such a step again.
A slow rank gives neither, whatever the time, so its step stays. So does a step of which all parts are there: whoever
was to commit it may be about to.
"""

import os
from contextlib import suppress
from pathlib import Path

from catalog.disk.durable import sync_dir, temporary_path
from catalog.errors import HistoryError
from catalog.format.journal import read_segment
from catalog.format.segments import current_segments, listings
from catalog.paths import HistoryPaths
from catalog.run_writer import RunWriter

__all__ = ["UncommittedParts"]


class UncommittedParts:
    """The published parts of one rank whose steps are not committed yet. For the thread that publishes them."""

    def __init__(self, run: RunWriter) -> None:
        self._run = run
        self._waiting: list[int] = []

    def published(self, step: int) -> None:
        """Note that this rank's part of `step` is published, and remove earlier ones that a commit has overtaken."""
        self._waiting.append(step)
        self._withdraw_overtaken()

    def closing(self) -> None:
        """Remove also the parts of steps that the journals of other ranks call failed."""
        self._withdraw_overtaken()
        if self._waiting:
            failed = _failed_steps(self._run.paths, self._run.run)
            self._withdraw([step for step in self._waiting if step in failed])

    def _withdraw_overtaken(self) -> None:
        committed = [place for place, step in enumerate(self._waiting) if self._is_committed(step)]
        if committed:
            self._withdraw(self._waiting[: committed[-1] + 1])

    def _withdraw(self, steps: list[int]) -> None:
        for step in steps:
            if not self._is_committed(step) and self._is_a_part_missing(step):
                self._remove(step)
        self._waiting = [step for step in self._waiting if step not in steps and not self._is_committed(step)]

    def _is_committed(self, step: int) -> bool:
        return self._run.paths.marker(self._run.run, step).exists()

    def _is_a_part_missing(self, step: int) -> bool:
        """Look at the folder itself: a network file system answers questions after single names from its cache, but
        lists a folder anew once this process has written to it. A folder that is gone misses nothing: its checkpoint
        was committed, and removed.
        """
        run = self._run
        folder = run.paths.step_dir(run.run, step)
        if not folder.is_dir():
            return False
        probe = temporary_path(run.paths.data(run.run, step, run.rank))
        probe.touch()
        probe.unlink()
        names = set(os.listdir(folder))
        manifests = {run.paths.manifest(run.run, step, rank).name for rank in range(run.world_size)}
        return run.paths.marker(run.run, step).name not in names and not manifests <= names

    def _remove(self, step: int) -> None:
        run = self._run
        # The record comes before the removal: queries still show the step as one that was begun.
        run.journal.event("collected", step, reason="another rank has failed this step")
        run.journal.flush()
        folder = run.paths.step_dir(run.run, step)
        # The manifest goes first: one without its data must never be seen.
        for path in (run.paths.manifest(run.run, step, run.rank), run.paths.data(run.run, step, run.rank)):
            path.unlink(missing_ok=True)
        sync_dir(folder)
        try:
            folder.rmdir()
        except OSError:
            # The parts of other ranks are still there; the last rank removes the folder.
            return
        sync_dir(run.paths.steps_dir(run.run))


def _failed_steps(paths: HistoryPaths, run: str) -> set[int]:
    """Return the steps that any rank's journal calls failed. A damaged segment says nothing."""
    failed: set[int] = set()
    folder = paths.journal_dir(run)
    for names in listings(folder):
        with suppress(FileNotFoundError):
            for segment in current_segments(names):
                failed |= _failed_in(folder / segment.name, run)
            break
    return failed


def _failed_in(path: Path, run: str) -> set[int]:
    try:
        table = read_segment(path, run=run)
    except FileNotFoundError:
        raise
    except (HistoryError, OSError):
        return set()
    rows = table.select(["kind", "name", "step"]).to_pylist()
    return {row["step"] for row in rows if row["kind"] == "event" and row["name"] == "failed"}
