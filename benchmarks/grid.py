"""Writing bytes to the disk: alignment x coalescing x buffered or O_DIRECT x layout in files.

This is the experiment of arXiv 2512.24511 at the size of a small machine, without any part of DSHistory. Four threads
write equal pieces of memory into new files and make them durable. The address of *congruent* memory equals its file
offset modulo 4096, and that of memory *by sectors* modulo 512. *Shifted* memory has neither, so O_DIRECT needs a copy
first. *Coalesced* writes gather pieces of up to 8 MiB, as a vector or, where they are copied anyway, in the buffer;
otherwise each piece is one write. The layouts are one preallocated file, or one file per piece.
"""

import errno
import mmap
import os
import shutil
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.measure import Rows, Series, clock, make_durable, rotations

COLUMNS = {"durable": "s", "rate": "GB/s"}
GATHERED = 8 << 20
THREADS = 4
SHIFTS = {"congruent": 0, "by sectors": 512, "shifted": 64}


@dataclass(frozen=True)
class Cell:
    piece: int
    alignment: str
    direct: bool
    coalesced: bool
    one_file: bool

    @property
    def name(self) -> str:
        way = "O_DIRECT" if self.direct else "buffered"
        layout = "one file" if self.one_file else "a file each"
        size = f"{self.piece >> 20} MiB" if self.piece >= 1 << 20 else f"{self.piece >> 10} KiB"
        return f"{size} pieces, {layout}, {way}, {self.alignment}, {'coalesced' if self.coalesced else 'single'}"


def cells(pieces: tuple[int, ...]) -> list[Cell]:
    """Return all combinations that differ.

    Pieces in separate files, or as large as a gathered write, can't be coalesced, and the page cache has no sectors.
    """
    found = []
    for piece, one_file, direct, alignment, coalesced in product(
        pieces, (True, False), (True, False), SHIFTS, (False, True)
    ):
        if (coalesced and not (one_file and piece < GATHERED)) or (alignment == "by sectors" and not direct):
            continue
        found.append(Cell(piece, alignment, direct, coalesced, one_file))
    return found


def run(scratch: Path, *, total_bytes: int, pieces: tuple[int, ...], times: int) -> tuple[Rows, dict[str, object]]:
    """Measure every cell in `times` interleaved rotations."""
    memory = mmap.mmap(-1, total_bytes + 4096)
    np.frombuffer(memory, dtype=np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)
    contenders = cells(pieces)
    rows: Rows = {cell.name: defaultdict(Series) for cell in contenders}
    skipped: dict[str, str] = {}
    folder = scratch / "grid"
    for cell in rotations(contenders, times=times):
        folder.mkdir()
        make_durable(folder)
        try:
            with clock() as durable:
                _write(cell, memoryview(memory)[SHIFTS[cell.alignment] :][:total_bytes], folder)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            skipped[cell.name] = f"refused by this device: {error.strerror}"
        else:
            rows[cell.name]["durable"].add(durable.seconds)
            rows[cell.name]["rate"].add(total_bytes / durable.seconds)
        shutil.rmtree(folder)
    kept = {name: row for name, row in rows.items() if name not in skipped}
    return kept, {"total_bytes": total_bytes, "pieces": pieces, "rotations": times, "skipped": skipped}


def _write(cell: Cell, state: memoryview, folder: Path) -> None:
    """Write all of `state` and make it durable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if cell.direct else 0)
    lanes = _Lanes(cell, state)
    starts = range(0, len(state), GATHERED if cell.coalesced else cell.piece)
    with ThreadPoolExecutor(THREADS) as pool:
        if cell.one_file:
            descriptor = os.open(folder / "state", flags)
            try:
                os.posix_fallocate(descriptor, 0, len(state))
                list(pool.map(lambda at: lanes.write(descriptor, at, at), starts))
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        else:
            list(pool.map(lambda at: lanes.file(folder / str(at), flags, at), starts))
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class _Lanes:
    """The memory that each thread writes: the pieces themselves, or a copy where O_DIRECT can't take them."""

    def __init__(self, cell: Cell, state: memoryview) -> None:
        self.cell, self.state = cell, state
        self.copies = cell.direct and cell.alignment == "shifted"
        self.own = threading.local()

    def file(self, path: Path, flags: int, at: int) -> None:
        descriptor = os.open(path, flags)
        try:
            self.write(descriptor, at, 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, at: int, offset: int) -> None:
        """Execute the write that begins with the piece at `at`."""
        span = self.state[at : at + (GATHERED if self.cell.coalesced else self.cell.piece)]
        if self.copies:
            if not hasattr(self.own, "buffer"):
                self.own.buffer = mmap.mmap(-1, max(GATHERED, self.cell.piece))
            target = memoryview(self.own.buffer)[: len(span)]
            target[:] = span
            span = target
        pieces = [span[i : i + self.cell.piece] for i in range(0, len(span), self.cell.piece)]
        written = os.pwritev(descriptor, [span] if self.copies else pieces, offset)
        if written != len(span):
            raise OSError(errno.EIO, f"{written} of {len(span)} bytes written")
