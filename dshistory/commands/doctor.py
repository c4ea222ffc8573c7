"""A report on the machine and a folder: backends, alignment, limits, and rates measured with the library's own writer
and reader."""

import contextlib
import os
import platform
import resource
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import native
from catalog.data_files.pieces import Piece
from catalog.data_files.stored_bytes import read_to
from catalog.errors import NotFoundError, SetupError
from dshistory import current
from dshistory.display.formats import Format
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.registry import verb

if TYPE_CHECKING:
    from capture.snapshot.writer_tuning import Settings

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


@verb("doctor .", needs_history=False)
def doctor(folder: str | None = None, *, size_mib: int = 256) -> Report:
    """Examine the machine and a folder: which writer backends work and why others do not, the properties of the file
    system, and measured write and read rates.

    Writes size_mib into a temporary file in the folder and removes it, also when interrupted.

    Args:
        folder: the folder of a history, existing or planned; default: the current history's, else the working directory
        size_mib: the amount to write and read for the rates, in MiB
    """
    from capture.defaults import DEFAULT_BUDGET_BYTES
    from capture.snapshot.writer_tuning import measure_settings

    place = _place(folder)
    if size_mib < 1:
        raise SetupError(f"size_mib must be at least 1, not {size_mib}")
    if not os.access(place, os.W_OK):
        raise SetupError(f"no permission to write in {place}; the rates are measured with a temporary file there")
    file_system = native.probe_file_system(str(place))
    align = int(file_system["place_align"])
    with _folder_in(place) as scratch:
        backends, read_bytes_s = _measure(
            scratch, align=align, nbytes=size_mib * _MIB, budget_bytes=DEFAULT_BUDGET_BYTES
        )
    settings = {
        str(row["backend"]): measure_settings(place, backend=str(row["backend"]), align=align)
        for row in backends
        if row["works"]
    }
    facts = {**_file_system_facts(place, file_system), "read rate (bytes/s)": read_bytes_s, **_machine_facts()}
    packages = {"package": list(_PACKAGES), "version": [_version(name) for name in _PACKAGES]}
    tables = {
        "writer backends": Table(
            pa.Table.from_pylist(backends, schema=_BACKENDS_SCHEMA),
            formats={"write_bytes_s": "bytes"},
            note=f"write rate: one file of {size_mib} MiB until it is durable; registered: whether the kernel accepts "
            f"the default {DEFAULT_BUDGET_BYTES // _MIB} MiB of staging memory as registered buffers",
        ),
        "writer settings": Table(
            pa.Table.from_pylist(_settings_rows(settings), schema=_SETTINGS_SCHEMA),
            formats={"block_bytes": "bytes", "bytes_per_s": "bytes"},
            note="chosen: used by runs on this file system from now on; "
            "the default stays unless another setting is clearly faster",
        ),
        "packages": Table(pa.table(packages)),
    }
    return Report(f"doctor: {place}", facts, tables, _FORMATS)


@contextlib.contextmanager
def _folder_in(place: Path) -> Iterator[Path]:
    """Make a folder that is removed again, also where Ctrl-C comes right after it was made: its name is known before,
    unlike that of a `TemporaryDirectory`.
    """
    folder = place / f".dshistory-doctor-{uuid.uuid4().hex}"
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_BACKENDS_SCHEMA: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("works", pa.bool_()),
        ("registered", pa.bool_()),
        ("write_bytes_s", pa.float64()),
        ("why_not", pa.string()),
    ]
)

_SETTINGS_SCHEMA: Final = pa.schema(
    [
        ("backend", pa.string()),
        ("block_bytes", pa.int64()),
        ("depth", pa.int64()),
        ("bytes_per_s", pa.float64()),
        ("chosen", pa.bool_()),
        ("origin", pa.string()),
    ]
)


def _settings_rows(settings: dict[str, "Settings"]) -> list[dict[str, object]]:
    """Return a row for each setting that was tried, or for the default where nothing could be measured."""
    rows: list[dict[str, object]] = []
    for backend, one in settings.items():
        untried = {"block_bytes": one.block_bytes, "depth": one.depth, "bytes_per_s": None}
        for trial in map(asdict, one.trials) if one.trials else [untried]:
            chosen = (trial["block_bytes"], trial["depth"]) == (one.block_bytes, one.depth)
            rows.append({**trial, "backend": backend, "chosen": chosen, "origin": one.origin if chosen else None})
    return rows


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
    from capture.publishing.movable_memory import can_be_moved, huge_page_setting

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "locked memory limit": "unlimited" if limit == resource.RLIM_INFINITY else limit,
        "huge pages": _huge_pages(huge_page_setting(), os.environ.get("THP_MEM_ALLOC_ENABLE"), movable=can_be_moved()),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _huge_pages(setting: str, torch_asks: str | None, *, movable: bool) -> str:
    """Say whether the tensors of a training are in huge pages, and what to do when they could be."""
    if setting != "madvise":
        return "yes, for all memory" if setting == "always" else "no: this host has none"
    if torch_asks == "1":
        return "yes, for tensors too (THP_MEM_ALLOC_ENABLE=1)"
    if movable:
        return "yes, for tensors too: a session moves those there that it writes from memory and nothing has pinned"
    return (
        "not for tensors: start the training with THP_MEM_ALLOC_ENABLE=1, and hashing and writing them takes a third "
        "less processor time"
    )


def _measure(folder: Path, *, align: int, nbytes: int, budget_bytes: int) -> tuple[list[dict[str, object]], float]:
    """Return a row for each backend, and the bytes per second that the reader reaches."""
    from capture.snapshot.writer_tuning import time_write

    memory = np.full(nbytes + align, 0x5A, np.uint8)
    source = memory[-memory.ctypes.data % align :][:nbytes]
    io_uring = native.probe_io_uring()
    rows: list[dict[str, object]] = []
    for backend, why_not in (("io_uring", io_uring), ("posix", "")):
        row: dict[str, object] = {"backend": backend, "works": not why_not, "why_not": why_not or None}
        if not why_not:
            writer = native.Writer(backend=backend, budget_bytes=budget_bytes)
            try:
                row["registered"] = writer.registered
                row["write_bytes_s"] = nbytes / time_write(writer, folder / backend, source, align=align)
            finally:
                writer.close()
        rows.append(row)
    return rows, nbytes / _read(folder / "posix", source, offset=align)


def _read(path: Path, target: _Bytes, *, offset: int) -> float:
    """Return the seconds that it takes to read the bytes back from the device."""
    _drop_cached_pages(path)
    began = time.perf_counter()
    read_to(path.parent, [Piece(path.name, offset, target.nbytes)], [target.ctypes.data])
    return time.perf_counter() - began


def _drop_cached_pages(path: Path) -> None:
    """Drop the file's pages from the page cache, so that the next read goes to the device."""
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
