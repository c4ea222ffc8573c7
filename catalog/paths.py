"""The paths of a history: the names of its folders and files, built and parsed."""

import re
from dataclasses import dataclass
from pathlib import Path

from catalog.errors import FormatError

__all__ = [
    "MAX_RANKS",
    "HistoryPaths",
    "check_run_id",
    "data_file",
    "is_checkpoint_file",
    "is_lock_name",
    "is_packed_name",
    "is_part_name",
    "is_run_id",
    "manifest_file",
    "marker_file",
    "packed_file",
    "parse_data_file",
    "parse_removed_dir",
    "parse_step_dir",
    "step_folder",
]

MAX_RANKS = 100_000
"""A rank has five digits in the names of files."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_STEP_DIR = re.compile(r"[0-9]{12}")
_REMOVED_DIR = re.compile(r"\.([0-9]{12})\.[0-9a-f]{8}\.tmp")
_MARKER = "commit.json"
_PACKED = ".packed"
_PART = re.compile(r"rank-[0-9]{5}\.(safetensors|packed|manifest\.parquet)")
_LOCK = re.compile(r"rank-[0-9]{5}\.lock")
_DATA_FILE = re.compile(rf"runs/({_RUN_ID.pattern})/steps/([0-9]{{12}})/rank-([0-9]{{5}})\.safetensors")


def is_run_id(name: str) -> bool:
    """Return whether a run can have this name."""
    return _RUN_ID.fullmatch(name) is not None


def check_run_id(run: str) -> str:
    """Return the run id itself; FormatError when it can't be the name of a folder."""
    if not is_run_id(run):
        raise FormatError(f"run id {run!r}: letters, digits, '.', '_' and '-' only, at most 128 of them")
    return run


def parse_step_dir(name: str) -> int | None:
    """Return the step that a folder's name stands for, or None for any other name."""
    return int(name) if _STEP_DIR.fullmatch(name) else None


def parse_removed_dir(name: str) -> int | None:
    """Return the step whose checkpoint was removed, when this is the name that its folder then has, else None."""
    match = _REMOVED_DIR.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file in the folder of a step can have this name: the marker, or a file of a rank."""
    return name == _MARKER or is_part_name(name)


def is_part_name(name: str) -> bool:
    """Return whether a rank's data file, the packed image of it, or its manifest can have this name."""
    return _PART.fullmatch(name) is not None


def is_lock_name(name: str) -> bool:
    """Return whether a rank's lock file can have this name."""
    return _LOCK.fullmatch(name) is not None


def step_folder(run: str, step: int) -> str:
    """Return the name of a step's folder, relative to the history's root. This and the next three are for whoever looks
    at the files of ten thousand steps: to make a path of each takes longer than the look."""
    return f"runs/{run}/steps/{step:012d}"


def marker_file(run: str, step: int) -> str:
    """Return the name of a step's commit marker, relative to the history's root."""
    return f"{step_folder(run, step)}/{_MARKER}"


def manifest_file(run: str, step: int, rank: int) -> str:
    """Return the name of one rank's manifest as markers write it: relative to the history's root."""
    return f"{step_folder(run, step)}/rank-{rank:05d}.manifest.parquet"


def data_file(run: str, step: int, rank: int) -> str:
    """Return the name of one rank's data file as manifests and markers write it: relative to the history's root."""
    return f"{step_folder(run, step)}/rank-{rank:05d}.safetensors"


def is_packed_name(name: str) -> bool:
    """Return whether the packed image of a rank's data file can have this name."""
    return is_part_name(name) and name.endswith(_PACKED)


def packed_file(file: str) -> str:
    """Return the name of the packed image of a data file, beside it."""
    return file.removesuffix(".safetensors") + _PACKED


def parse_data_file(file: str) -> tuple[str, int, int] | None:
    """Return (run, step, rank) when `file` is exactly the name of a data file below the root, else None."""
    match = _DATA_FILE.fullmatch(file)
    return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True, slots=True)
class HistoryPaths:
    """The paths of one history, all below `root`. Nothing here touches the disk."""

    root: Path

    @property
    def history_json(self) -> Path:
        return self.root / "history.json"

    @property
    def catalog_db(self) -> Path:
        return self.root / "catalog.duckdb"

    # The two files of the index's reader-writer lock (catalog/index/fair_lock.py). Their names on disk never change:
    # processes of different releases may use one history at the same time, and they exclude each other only when they
    # lock the same files.

    @property
    def index_queue_lock(self) -> Path:
        return self.root / "catalog.gate.lock"

    @property
    def index_access_lock(self) -> Path:
        return self.root / "catalog.room.lock"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run_dir(self, run: str) -> Path:
        return self.runs / check_run_id(run)

    def run_json(self, run: str) -> Path:
        return self.run_dir(run) / "run.json"

    def steps_dir(self, run: str) -> Path:
        return self.run_dir(run) / "steps"

    def step_dir(self, run: str, step: int) -> Path:
        return self.root / step_folder(check_run_id(run), step)

    def data(self, run: str, step: int, rank: int) -> Path:
        return self.root / data_file(run, step, rank)

    def manifest(self, run: str, step: int, rank: int) -> Path:
        return self.root / manifest_file(check_run_id(run), step, rank)

    def marker(self, run: str, step: int) -> Path:
        return self.root / marker_file(check_run_id(run), step)

    def journal_dir(self, run: str) -> Path:
        return self.run_dir(run) / "journal"

    def fingerprints_dir(self, run: str) -> Path:
        return self.run_dir(run) / "fingerprints"

    def redo_dir(self, run: str) -> Path:
        return self.run_dir(run) / "redo"

    def statistics_dir(self, run: str) -> Path:
        return self.run_dir(run) / "statistics"

    def audits_dir(self, run: str) -> Path:
        return self.run_dir(run) / "audits"

    def locks_dir(self, run: str) -> Path:
        return self.run_dir(run) / "locks"

    def lock(self, run: str, rank: int) -> Path:
        return self.locks_dir(run) / f"rank-{rank:05d}.lock"

    def relative(self, path: Path) -> str:
        """Return a file's name as manifests and markers write it: relative to the root, with forward slashes."""
        return path.relative_to(self.root).as_posix()
