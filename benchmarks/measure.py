"""Clocks, cold caches, peak memory, and the order in which contenders take turns."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Series:
    """The values of one figure over all rotations."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_json(self) -> dict[str, object]:
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": self.values}


Rows = dict[str, dict[str, Series]]
"""Series by contender, then by figure."""


@dataclass
class Clock:
    seconds: float = 0.0


@contextmanager
def clock() -> Iterator[Clock]:
    """Measure the wall time of the block, which is in `seconds` afterwards."""
    measured, started = Clock(), time.perf_counter()
    try:
        yield measured
    finally:
        measured.seconds = time.perf_counter() - started


def rotations(contenders: Sequence[T], *, times: int) -> Iterator[T]:
    """Yield every contender once per rotation; each rotation starts one contender later."""
    for turn in range(times):
        shift = turn % len(contenders)
        yield from (*contenders[shift:], *contenders[:shift])


class PeakMemory:
    """The peak of this process's resident memory above its value at `start`, from the kernel's high-water mark."""

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident_bytes()

    def extra_bytes(self) -> int:
        return max(0, _status_bytes("VmHWM") - self.before)


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def fetched_bytes() -> int:
    """Return the bytes that disks have read for this process so far, including read-ahead."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise LookupError("read_bytes")


def files_under(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def make_durable(folder: Path) -> None:
    """Call fsync for every file and folder below, which a checkpoint needs to survive a power failure."""
    for path in [*files_under(folder), *(p for p in folder.rglob("*") if p.is_dir()), folder, folder.parent]:
        with _if_there(path) as descriptor:
            if descriptor is not None:
                os.fsync(descriptor)


def forget(folder: Path) -> None:
    """Drop the files below from the page cache, so that the next read comes from the disk."""
    for path in files_under(folder):
        with _if_there(path) as descriptor:
            if descriptor is not None:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _if_there(path: Path) -> Iterator[int | None]:
    """Yield the open file, or None if it no longer exists: journal and index still change after a checkpoint is
    durable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
