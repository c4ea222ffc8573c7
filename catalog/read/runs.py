"""The runs of a history and their steps, listed from its folders. Neither a manifest nor the index is read."""

import os

from catalog.disk.locks import is_locked
from catalog.errors import NotFoundError
from catalog.format.json_facts import read_run_facts
from catalog.paths import HistoryPaths, is_run_id, parse_step_dir
from catalog.records import RunFacts

__all__ = ["current_run", "run_facts", "run_is_held", "run_names", "runs", "step_dirs", "steps"]


def run_names(paths: HistoryPaths) -> list[str]:
    """Return the names of all runs, sorted: the folders with a valid name and a run.json."""
    try:
        names = os.listdir(paths.runs)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if is_run_id(name) and paths.run_json(name).is_file())


def run_facts(paths: HistoryPaths, run: str) -> RunFacts:
    """Return the checked facts of one run. NotFoundError names the runs that exist; FormatError and CorruptError say
    which field of run.json can't be trusted."""
    try:
        return read_run_facts(paths, run)
    except FileNotFoundError as error:
        names = ", ".join(run_names(paths)[-10:]) or "none"
        raise NotFoundError(f"no run {run!r} in {paths.root}: there are {names}") from error


def runs(paths: HistoryPaths) -> list[RunFacts]:
    """Return the facts of all runs, oldest first."""
    return sorted((run_facts(paths, name) for name in run_names(paths)), key=lambda facts: (facts.created, facts.run))


def current_run(paths: HistoryPaths) -> str:
    """Return the newest training run, the one that a plain step refers to. A replay never becomes current.
    NotFoundError when the history has no run."""
    training = [facts for facts in runs(paths) if not facts.facts.get("replay")]
    if not training:
        raise NotFoundError(
            f"the history {paths.root} has no run yet: a training with "
            f"`capture.enable(..., history={str(paths.root)!r})` makes one"
        )
    return training[-1].run


def run_is_held(paths: HistoryPaths, run: str) -> bool:
    """Return whether a live process writes this run: each of its ranks locks a file of its own while it may write."""
    folder = paths.locks_dir(run)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    return any(is_locked(folder / name) for name in names)


def steps(paths: HistoryPaths, run: str) -> list[int]:
    """Return the committed steps of a run, ascending."""
    folder = paths.steps_dir(run)
    marker = paths.marker(run, 0).name
    # Creating a Path for each of ten thousand steps would take longer than the look at the disk.
    return [step for step in step_dirs(paths, run) if os.path.exists(f"{folder}/{step:012d}/{marker}")]  # noqa: PTH110


def step_dirs(paths: HistoryPaths, run: str) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending."""
    try:
        names = os.listdir(paths.steps_dir(run))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(step for step in map(parse_step_dir, names) if step is not None)
