"""The block size and depth with which the writer is fastest on a file system: measured once, remembered for the
account.

A setting other than the default must be clearly faster, so that noise does not choose, and so that the smaller blocks
are worth what they cost: the kernel takes more processor time for each of them, which the training lacks.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import native
from catalog.disk.durable import publish_bytes

__all__ = ["Settings", "Trial", "measure_settings", "settings_for", "time_write"]

MIB = 1 << 20
FILE_BYTES = 48 * MIB
ROUNDS = 3
MOST_S = 1.5
"""Measuring a slow disk stops after this time, and the default is used."""

CLEARLY = 1.25
CANDIDATES = ((8 * MIB, 4), (1 * MIB, 32), (2 * MIB, 16), (4 * MIB, 8), (8 * MIB, 8), (16 * MIB, 2))

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """The throughput of writing a new preallocated file until it is durable: the median of all rounds."""

    block_bytes: int
    depth: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """Block size and depth for a writer. `origin`: "measured", "remembered", or why the default is used unmeasured."""

    block_bytes: int
    depth: int
    origin: str
    trials: tuple[Trial, ...] = ()


def settings_for(folder: Path, *, backend: str, align: int) -> Settings:
    """Return the settings remembered for the file system of `folder`; without any, measure there now and remember.
    Never fails because of the memory: `origin` says when it can't be written.
    """
    known = _recall(folder, backend)
    return known if known is not None else measure_settings(folder, backend=backend, align=align)


def measure_settings(folder: Path, *, backend: str, align: int) -> Settings:
    """Measure in `folder`, for about a second, and remember. The files are removed, also when interrupted."""
    if shutil.disk_usage(folder).free < 8 * FILE_BYTES:
        return Settings(*CANDIDATES[0], origin="default: too little space to measure")
    try:
        with tempfile.TemporaryDirectory(prefix=".dshistory-tuning-", dir=folder) as scratch:
            trials = _trials(Path(scratch), backend=backend, align=align)
    except OSError as error:
        return Settings(*CANDIDATES[0], origin=f"default: measuring failed: {error}")
    origin, chosen = "measured", CANDIDATES[0]
    if trials:
        best = max(trials, key=lambda trial: trial.bytes_per_s)
        if best.bytes_per_s > CLEARLY * trials[0].bytes_per_s:
            chosen = (best.block_bytes, best.depth)
    else:
        origin = "default: the disk is too slow to measure in passing"
    try:
        _remember(folder, backend, chosen, trials)
    except OSError as error:
        origin += f", and it can't be remembered: {error}"
    return Settings(*chosen, origin, trials)


def time_write(writer: native.Writer, path: Path, source: npt.NDArray[np.uint8], *, align: int) -> float:
    """Return the seconds until `source`, whose address is a multiple of `align`, is durable in a new file."""
    plan = native.WritePlan(
        offsets=np.array([align], np.uint64),
        addresses=np.array([source.ctypes.data], np.uint64),
        nbytes=np.array([source.nbytes], np.uint64),
        eager=np.zeros(1, np.uint8),
        data_start=align,
        data_end=align + -(-source.nbytes // align) * align,
        align=align,
    )
    began = time.perf_counter()
    job = writer.start(plan, str(path))
    try:
        while not job.wait(timeout_s=0.1):  # returns to Python, so that Ctrl-C works
            pass
        job.finish(header=bytes(align), trailer=b"")
    except BaseException:
        job.abort()
        raise
    return time.perf_counter() - began


def _trials(scratch: Path, *, backend: str, align: int) -> tuple[Trial, ...]:
    """Time all candidates, interleaved; return () when the time is over before each had two turns."""
    memory = np.full(FILE_BYTES + align, 0x5A, np.uint8)
    source = memory[-memory.ctypes.data % align :][:FILE_BYTES]
    seconds: dict[tuple[int, int], list[float]] = {candidate: [] for candidate in CANDIDATES}
    deadline = time.perf_counter() + MOST_S
    for _ in range(ROUNDS):
        for block_bytes, depth in CANDIDATES:
            writer = native.Writer(
                backend=backend, budget_bytes=2 * block_bytes + MIB, block_bytes=block_bytes, depth=depth
            )
            try:
                taken = time_write(writer, scratch / "file", source, align=align)
            finally:
                writer.close()
            seconds[block_bytes, depth].append(taken)
            (scratch / "file").unlink()
            if time.perf_counter() > deadline:
                break
    if any(len(taken) < 2 for taken in seconds.values()):
        return ()
    return tuple(
        Trial(block_bytes, depth, FILE_BYTES / statistics.median(taken))
        for (block_bytes, depth), taken in seconds.items()
    )


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dshistory" / "writer.json"


def _key(folder: Path, backend: str) -> str:
    return f"{os.statvfs(folder).f_fsid:x}-{folder.stat().st_dev:x}-{backend}"


def _recall(folder: Path, backend: str) -> Settings | None:
    try:
        entry = _load()[_key(folder, backend)]
        trials = tuple(Trial(**trial) for trial in entry["trials"])
        chosen = (entry["block_bytes"], entry["depth"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # No file, or a damaged one: the settings are measured again, and written anew.
        return None
    return Settings(*chosen, "remembered", trials) if chosen in CANDIDATES else None


def _load() -> dict[str, Any]:
    document = json.loads(_memory().read_bytes())
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}")
    entries: dict[str, Any] = document["file_systems"]
    return dict(entries)


def _remember(folder: Path, backend: str, chosen: tuple[int, int], trials: tuple[Trial, ...]) -> None:
    try:
        entries = _load()
    except (OSError, ValueError, KeyError, TypeError):
        entries = {}
    entries[_key(folder, backend)] = {
        "block_bytes": chosen[0],
        "depth": chosen[1],
        "trials": [asdict(trial) for trial in trials],
    }
    path = _memory()
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_bytes(json.dumps({"version": _VERSION, "file_systems": entries}, indent=1).encode(), path)
