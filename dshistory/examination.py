"""What this machine and folder can do: backends, alignment, limits, and rates measured with the library's own writer
and reader."""

import os
import platform
import resource
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import native
from catalog.errors import NotFoundError, SetupError
from dshistory import current
from dshistory.report import Report
from dshistory.table import Table
from dshistory.units import Format

__all__ = ["doctor"]

_Bytes = npt.NDArray[np.uint8]

_MIB: Final = 1 << 20
_PACKAGES: Final = ("dshistory", "torch", "deepspeed", "duckdb", "pyarrow", "numpy", "ipywidgets", "plotly")
_FORMATS: Final[dict[str, Format]] = {
    "block size": "bytes",
    "placement modulus": "bytes",
    "memory alignment": "bytes",
    "offset alignment": "bytes",
    "free space": "bytes",
    "locked memory limit": "bytes",
    "read rate (bytes/s)": "bytes",
}


def doctor(folder: str | None = None, *, size_mib: int = 256) -> Report:
    """What this machine can do in a folder: the writer backends that work and why others do not, what the file system
    reports, measured write and read rates.

    Writes size_mib into a temporary file there and removes it, also when interrupted.

    Args:
        folder: where a history is or will be; default: the current history's, else the working directory
        size_mib: how much to write and read for the rates
    """
    from capture.enable import DEFAULT_BUDGET_BYTES

    place = _place(folder)
    if size_mib < 1:
        raise SetupError(f"size_mib must be at least 1, not {size_mib}")
    if not os.access(place, os.W_OK):
        raise SetupError(f"no permission to write in {place}; the rates are measured with a temporary file there")
    file_system = native.probe_file_system(str(place))
    align = int(file_system["place_align"])
    with tempfile.TemporaryDirectory(prefix=".dshistory-doctor-", dir=place) as folder:
        backends, read_bytes_s = _measure(
            Path(folder), align=align, nbytes=size_mib * _MIB, budget_bytes=DEFAULT_BUDGET_BYTES
        )
    facts = {**_file_system_facts(place, file_system), "read rate (bytes/s)": read_bytes_s, **_machine_facts()}
    packages = {"package": list(_PACKAGES), "version": [_version(name) for name in _PACKAGES]}
    tables = {
        "writer backends": Table(
            pa.Table.from_pylist(backends, schema=_BACKENDS_SCHEMA),
            formats={"write_bytes_s": "bytes"},
            note=f"write rate of one file of {size_mib} MiB until durable; registered: whether the kernel let the "
            f"{DEFAULT_BUDGET_BYTES // _MIB} MiB of staging memory that is the default be registered",
        ),
        "packages": Table(pa.table(packages)),
    }
    return Report(f"doctor: {place}", facts, tables, _FORMATS)


_BACKENDS_SCHEMA: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("works", pa.bool_()),
        ("registered", pa.bool_()),
        ("write_bytes_s", pa.float64()),
        ("why_not", pa.string()),
    ]
)


def _place(folder: str | None) -> Path:
    if folder is None:
        try:
            return current.current().root
        except NotFoundError:
            return Path.cwd()
    if not Path(folder).is_dir():
        raise NotFoundError(f"no folder {folder}; doctor measures in a folder that exists")
    return Path(folder).resolve()


def _file_system_facts(place: Path, probed: dict[str, Any]) -> dict[str, object]:
    return {
        "file system": probed["type"],
        "O_DIRECT": "yes" if probed["direct"] else f"no: {probed['reason']}",
        "memory alignment": probed["memory_align"],
        "offset alignment": probed["offset_align"],
        "block size": probed["block_bytes"],
        "placement modulus": probed["place_align"],
        "free space": shutil.disk_usage(place).free,
    }


def _machine_facts() -> dict[str, object]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "locked memory limit": "unlimited" if limit == resource.RLIM_INFINITY else limit,
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _measure(folder: Path, *, align: int, nbytes: int, budget_bytes: int) -> tuple[list[dict[str, object]], float]:
    """A row for each backend, and the bytes a second that the reader gives."""
    memory = np.full(nbytes + align, 0x5A, np.uint8)
    source = memory[-memory.ctypes.data % align :][:nbytes]
    io_uring = native.probe_io_uring()
    rows: list[dict[str, object]] = []
    for backend, why_not in (("io_uring", io_uring), ("posix", "")):
        row: dict[str, object] = {"backend": backend, "works": not why_not, "why_not": why_not or None}
        if not why_not:
            engine = native.Engine(backend=backend, budget_bytes=budget_bytes)
            try:
                row["registered"] = engine.registered
                row["write_bytes_s"] = nbytes / _write(engine, folder / backend, source, align=align)
            finally:
                engine.close()
        rows.append(row)
    return rows, nbytes / _read(folder / "posix", source, offset=align)


def _write(engine: native.Engine, path: Path, source: _Bytes, *, align: int) -> float:
    """Seconds until the bytes are durable."""
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
    job = engine.start(plan, str(path))
    try:
        while not job.wait(timeout_s=0.1):  # returns to Python, so that Ctrl-C is heard
            pass
        job.finish(header=bytes(align), tail=b"")
    except BaseException:
        job.abort()
        raise
    return time.perf_counter() - began


def _read(path: Path, target: _Bytes, *, offset: int) -> float:
    """Seconds to read the bytes back from the device."""
    _forget(path)
    began = time.perf_counter()
    native.read(
        [str(path)],
        file_index=np.zeros(1, np.uint32),
        offsets=np.array([offset], np.uint64),
        addresses=np.array([target.ctypes.data], np.uint64),
        nbytes=np.array([target.nbytes], np.uint64),
    )
    return time.perf_counter() - began


def _forget(path: Path) -> None:
    """Drop the file's pages, so that reading it reads the device."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
