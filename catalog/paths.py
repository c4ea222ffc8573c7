"""Names and places: where each file of a history lies, and what a dtype's elements weigh."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from catalog.errors import FormatError

__all__ = [
    "DTYPES",
    "FORMAT",
    "MAX_DIMENSIONS",
    "MAX_RANKS",
    "HistoryPaths",
    "check_run_id",
    "data_file",
    "is_run_id",
    "parse_data_file",
    "parse_step_dir",
]

FORMAT = 1
MAX_RANKS = 100_000
MAX_DIMENSIONS = 64

DTYPES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
        "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
        "U32": 4, "I32": 4, "F32": 4,
        "U64": 8, "I64": 8, "F64": 8,
    }
)  # fmt: skip

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_STEP_DIR = re.compile(r"[0-9]{12}")
_DATA_FILE = re.compile(rf"runs/({_RUN_ID.pattern})/steps/([0-9]{{12}})/rank-([0-9]{{5}})\.safetensors")


def is_run_id(name: str) -> bool:
    """Whether a run can have this name."""
    return _RUN_ID.fullmatch(name) is not None


def check_run_id(run: str) -> str:
    """The run id itself, or FormatError when it could not be a folder's name."""
    if not is_run_id(run):
        raise FormatError(f"run id {run!r}: letters, digits, '.', '_' and '-' only, at most 128 of them")
    return run


def parse_step_dir(name: str) -> int | None:
    """The step a folder's name stands for, or None for any other name."""
    return int(name) if _STEP_DIR.fullmatch(name) else None


def data_file(run: str, step: int, rank: int) -> str:
    """The data file of one rank as manifests and markers name it: relative to the history's root."""
    return f"runs/{run}/steps/{step:012d}/rank-{rank:05d}.safetensors"


def parse_data_file(file: str) -> tuple[str, int, int] | None:
    """(run, step, rank) when `file` is exactly the name of a data file below the root, else None."""
    match = _DATA_FILE.fullmatch(file)
    return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True, slots=True)
class HistoryPaths:
    """The places of one history, all below `root`."""

    root: Path

    @property
    def history_json(self) -> Path:
        return self.root / "history.json"

    @property
    def catalog_db(self) -> Path:
        return self.root / "catalog.duckdb"

    @property
    def gate_lock(self) -> Path:
        return self.root / "catalog.gate.lock"

    @property
    def room_lock(self) -> Path:
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
        return self.steps_dir(run) / f"{step:012d}"

    def data(self, run: str, step: int, rank: int) -> Path:
        return self.root / data_file(run, step, rank)

    def manifest(self, run: str, step: int, rank: int) -> Path:
        return self.step_dir(run, step) / f"rank-{rank:05d}.manifest.parquet"

    def marker(self, run: str, step: int) -> Path:
        return self.step_dir(run, step) / "commit.json"

    def journal_dir(self, run: str) -> Path:
        return self.run_dir(run) / "journal"

    def statistics_dir(self, run: str) -> Path:
        return self.run_dir(run) / "statistics"

    def locks_dir(self, run: str) -> Path:
        return self.run_dir(run) / "locks"

    def lock(self, run: str, rank: int) -> Path:
        return self.locks_dir(run) / f"rank-{rank:05d}.lock"

    def relative(self, path: Path) -> str:
        """The name of a file as manifests and markers write it: relative to the root, with forward slashes."""
        return path.relative_to(self.root).as_posix()
