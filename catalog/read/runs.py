"""The runs of a history and their steps, listed from its folders. Neither a manifest nor the index is read."""

import os
from pathlib import Path

from catalog.disk.json_file import read_bytes
from catalog.disk.locks import is_locked
from catalog.disk.regular_file import check_folders, is_real_folder
from catalog.errors import NotFoundError
from catalog.format.json_facts import decode_run_facts
from catalog.paths import HistoryPaths, is_lock_name, is_run_id, marker_file, parse_step_dir
from catalog.records import RunFacts

__all__ = [
    "is_committed",
    "run_facts",
    "run_folders",
    "run_is_held",
    "run_json_bytes",
    "run_named",
    "run_names",
    "step_dirs",
    "steps",
]


def run_names(paths: HistoryPaths) -> list[str]:
    """Return the names of all runs, sorted: the folders with a valid name and a run.json."""
    return [name for name in run_folders(paths) if os.path.lexists(paths.run_json(name))]


def run_folders(paths: HistoryPaths) -> list[str]:
    """Return the names of all folders that can be a run's, sorted, with and without a run.json. FormatError when the
    folder of runs is no real folder."""
    check_folders(paths.runs, root=paths.root)
    return sorted(name for name in _folders(paths.runs) if is_run_id(name))


def run_facts(paths: HistoryPaths, run: str) -> RunFacts:
    """Return the checked facts of one run. NotFoundError names the runs that exist; FormatError and CorruptError say
    which field of run.json can't be trusted."""
    return decode_run_facts(run_json_bytes(paths, run), path=paths.run_json(run), run=run)


def run_json_bytes(paths: HistoryPaths, run: str) -> bytes:
    """Return the bytes of a run's run.json, unchecked. NotFoundError names the runs that exist; FormatError says what
    is in the place of a folder or of the file."""
    check_folders(paths.run_dir(run), root=paths.root)
    try:
        return read_bytes(paths.run_json(run))
    except FileNotFoundError as error:
        names = ", ".join(run_names(paths)[-10:]) or "none"
        raise NotFoundError(f"no run {run!r} in {paths.root}: there are {names}") from error


def run_named(paths: HistoryPaths, name: str) -> str:
    """Return the run that is called `name`, or the only one that begins with it. NotFoundError names those that
    begin so, or the runs that exist.
    """
    if not is_run_id(name) or not os.path.lexists(paths.run_json(name)):
        begin_so = [run for run in run_names(paths) if name and run.startswith(name)]
        if len(begin_so) > 1:
            raise NotFoundError(
                f"{len(begin_so)} runs of {paths.root} begin with {name!r}: {', '.join(begin_so[-10:])}"
            )
        if begin_so:
            return begin_so[0]
    run_facts(paths, name)
    return name


def run_is_held(paths: HistoryPaths, run: str) -> bool:
    """Return whether a live process writes this run, as far as this host can see: each of its ranks locks a file of its
    own while it may write. FormatError when such a file is no regular file."""
    folder = paths.locks_dir(run)
    check_folders(folder, root=paths.root)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    return any(is_locked(folder / name) for name in names if is_lock_name(name))


def steps(paths: HistoryPaths, run: str) -> list[int]:
    """Return the committed steps of a run, ascending."""
    return [step for step in step_dirs(paths, run) if is_committed(paths, run, step)]


def is_committed(paths: HistoryPaths, run: str, step: int) -> bool:
    """Return whether a step of a run, whose folder is a real one, is committed."""
    # Creating a Path for each of ten thousand steps would take longer than the look at the disk.
    return os.path.lexists(f"{paths.root}/{marker_file(run, step)}")


def step_dirs(paths: HistoryPaths, run: str) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending. Symbolic links to folders do not count."""
    return sorted(step for step in map(parse_step_dir, _folders(paths.steps_dir(run))) if step is not None)


def _folders(parent: Path) -> list[str]:
    """Return the names of the real folders in a folder; none when it is missing, or is a symbolic link itself."""
    if not is_real_folder(parent):
        return []
    try:
        with os.scandir(parent) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
