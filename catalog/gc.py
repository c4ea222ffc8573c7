"""Garbage collection: removes the parts of checkpoints that killed sessions left unfinished, and what a removal that
was cut off has left of a removed one.

Only runs that are certainly dead are touched. Their locks are held meanwhile, so no process can begin to write there.
Each removed checkpoint is recorded in the run's journal first, so that queries still show it as incomplete.

A history may contain anything, since people copy, link and mount. Folders are therefore opened without following
symbolic links, files are removed through the folder that was opened, and only regular files with names of the format
are removed. Whatever else lies there stays and is reported. Trouble with one run ends the collection of that run alone.
"""

import os
import secrets
from dataclasses import dataclass, field

from catalog.access.locked_run import locked_run
from catalog.disk.durable import final_name
from catalog.disk.folders import open_folder, remove_files
from catalog.disk.regular_file import check_folders
from catalog.errors import HistoryError
from catalog.format.audit_file import audited_step
from catalog.format.journal import NO_RANK, Journal
from catalog.format.redo_segment import is_redo_segment
from catalog.format.segments import is_segment
from catalog.format.statistics_file import parse_name
from catalog.paths import HistoryPaths, is_checkpoint_file, is_part_name, parse_removed_dir, parse_step_dir
from catalog.read.runs import run_names
from catalog.records import CheckpointRef

__all__ = ["Collected", "collect_garbage"]

_YOUNG_S = 3600.0
"""A temporary file that is younger may be the next file of somebody who analyzes, evaluates or audits the dead run and
needs no lock for that, since what he publishes is read by nobody before it is whole. The next collection removes it."""


@dataclass(slots=True)
class Collected:
    """The result of a collection: the checkpoints whose files were removed, and what was left, each with the reason."""

    checkpoints: list[CheckpointRef] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def collect_garbage(paths: HistoryPaths) -> Collected:
    """Delete the files of incomplete checkpoints, temporary files, and what is left of removed checkpoints, of all runs
    that no process writes.

    Committed checkpoints, live runs, and whatever is not a file of the format are never touched. Nothing that is wrong
    with a run raises: it is reported in `kept`.
    """
    collected = Collected()
    for run in run_names(paths):
        try:
            with locked_run(paths, run) as locked:
                if locked:
                    _collect_run(paths, run, collected)
        except (HistoryError, OSError) as error:
            collected.kept.append(f"run {run}: {error}")
    return collected


def _collect_run(paths: HistoryPaths, run: str, collected: Collected) -> None:
    check_folders(paths.journal_dir(run), root=paths.root)
    with open_folder(paths.runs) as runs, open_folder(run, runs) as own:
        remove_files(own, lambda name: name == paths.run_json(run).name, only_temporaries=True)
        present = os.listdir(own)
        for path, is_known, min_age_s in (
            (paths.journal_dir(run), is_segment, _YOUNG_S),
            (paths.fingerprints_dir(run), is_segment, 0.0),
            (paths.redo_dir(run), is_redo_segment, 0.0),
            (paths.statistics_dir(run), lambda name: parse_name(name) is not None, _YOUNG_S),
            (paths.audits_dir(run), lambda name: audited_step(name) is not None, _YOUNG_S),
        ):
            if path.name in present:
                with open_folder(path.name, own) as folder:
                    remove_files(folder, is_known, only_temporaries=True, min_age_s=min_age_s)
        if (name := paths.steps_dir(run).name) in present:
            with open_folder(name, own) as steps:
                _collect_removed(paths, run, steps, collected)
                _collect_steps(paths, run, steps, collected)
                there = {parse_step_dir(name) for name in os.listdir(steps)}
            if paths.statistics_dir(run).name in present:
                with open_folder(paths.statistics_dir(run).name, own) as folder:
                    remove_files(folder, lambda name: _is_of_none(name, there), only_temporaries=False)


def _is_of_none(name: str, steps: set[int | None]) -> bool:
    """Return whether a file has statistics of a step that is not there: they are removed after their checkpoint."""
    about = parse_name(name)
    return about is not None and about.step not in steps


def _collect_removed(paths: HistoryPaths, run: str, steps: int, collected: Collected) -> None:
    """Empty the folders of checkpoints that were removed, which are not listed any more."""
    for name in sorted(os.listdir(steps)):
        if parse_removed_dir(name) is None:
            continue
        try:
            with open_folder(name, steps) as folder:
                foreign = remove_files(folder, is_checkpoint_file, only_temporaries=False)
            if foreign:
                collected.kept.append(f"{paths.steps_dir(run) / name}: contains {_listed(foreign)}, which is not ours")
            else:
                os.rmdir(name, dir_fd=steps)
        except OSError as error:
            collected.kept.append(f"{paths.steps_dir(run) / name}: {error.strerror}: not a folder of this history")


def _collect_steps(paths: HistoryPaths, run: str, steps: int, collected: Collected) -> None:
    marker = paths.marker(run, 0).name
    begun = []
    for name in sorted(os.listdir(steps)):
        step = parse_step_dir(name)
        if step is None:
            continue
        try:
            with open_folder(name, steps) as folder:
                names = os.listdir(folder)
                if marker in names:
                    remove_files(folder, is_checkpoint_file, only_temporaries=True)
                elif not names or any(is_part_name(final_name(name) or name) for name in names):
                    begun.append((step, name))
                else:
                    collected.kept.append(f"{paths.step_dir(run, step)}: contains only {_listed(names)}")
        except OSError as error:
            collected.kept.append(f"{paths.step_dir(run, step)}: {error.strerror}: not a folder of this history")
    if begun:
        # Imported here, since most collections find nothing: they must not wait for DuckDB's import.
        from catalog.index.registered import registered_steps

        lost = registered_steps(paths, run) & {step for step, _ in begun}
        collected.kept += [f"{paths.marker(run, step)}: registered, but it is gone" for step in sorted(lost)]
        begun = [(step, name) for step, name in begun if step not in lost]
    if begun:
        # The record comes before the removal: after a kill in between, the next collection finds the folders again.
        journal = Journal(paths.journal_dir(run), run=run, writer=f"collector-{secrets.token_hex(4)}", rank=NO_RANK)
        for step, _ in begun:
            journal.event("collected", step)
        journal.flush()
    for step, name in begun:
        with open_folder(name, steps) as folder:
            # The folder is opened and listed again: an answer from a network file system's cache may be old.
            if marker in os.listdir(folder):
                continue
            foreign = remove_files(folder, is_checkpoint_file, only_temporaries=False)
        if foreign:
            collected.kept.append(f"{paths.step_dir(run, step)}: contains {_listed(foreign)}, which is not ours")
        else:
            os.rmdir(name, dir_fd=steps)
        collected.checkpoints.append(CheckpointRef(run, step))


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
