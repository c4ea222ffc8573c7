"""Takes memory for what is read next, in a thread, while something else is read.

Memory that a virtual machine must first get back from its host can take longer than the disk takes to bring as many
bytes. Whoever keeps what it reads, and could as well read it a second time, waits for memory only while that is the
shorter way.
"""

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Self

from catalog.data_files.pieces import Piece
from catalog.data_files.side_threads import begun
from catalog.data_files.stored_bytes import ReadBuffer

__all__ = ["MemoryAhead"]


class MemoryAhead:
    """Memory for one batch of pieces after the other, for one thread that reads. A context manager; what is being taken
    at its end is given up."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "dshistory-memory")
        self._coming: Future[tuple[ReadBuffer | None, float]] | None = None
        self._has_more = True
        self._began = 0.0
        self._nbytes = 0
        self._took_s = 0.0
        self._took_bytes = 0
        self._ended = False

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin to take memory for these pieces, unless some is being taken already, or the system has refused some."""
        if self._coming is None and self._has_more:
            self._began = monotonic()
            self._nbytes = sum(piece.nbytes for piece in pieces)
            self._coming = begun(self._pool, self._taken, pieces)

    def memory(self, *, patience_s: float) -> ReadBuffer | None:
        """Return the memory that was begun, once it is there; None where that would take longer than `patience_s`, or
        the system has refused it. How long it takes is what the memory before it tells, and once that time has gone by,
        as long again as it has taken."""
        if self._coming is None:
            return None
        passed_s = monotonic() - self._began
        expected_s = self._took_s / self._took_bytes * self._nbytes if self._took_bytes else 0.0
        left_s = expected_s - passed_s if expected_s > passed_s else passed_s
        timeout_s = patience_s if left_s < patience_s else 0.0
        try:
            memory, took_s = self._coming.result(None if timeout_s == math.inf else timeout_s)
        except TimeoutError:
            return None
        self._coming = None
        self._has_more = memory is not None
        self._took_s += took_s
        self._took_bytes += self._nbytes
        return memory

    def _taken(self, pieces: Sequence[Piece]) -> tuple[ReadBuffer | None, float]:
        memory = ReadBuffer()
        try:
            memory.populate(pieces, stopped=lambda: self._ended)
        except (OSError, MemoryError):
            return None, 0.0
        return memory, monotonic() - self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._pool.shutdown()
