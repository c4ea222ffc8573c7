"""Moves the tensors that snapshots read into huge pages, while the training goes on.

Torch's memory is in pages of 4 KiB on most hosts. To write it, the kernel looks up and pins each of them, and the
device gets a request for each MiB; of huge pages it takes one for 512. The kernel can move memory that is in use:
neither its content nor its address changes, and no thread notices, except one that touches the 2 MiB that are just
being copied, which waits for less than a millisecond.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

import native

__all__ = ["HugePages", "huge_page_setting"]

HUGE_PAGE_BYTES = 2 << 20
PIECE_BYTES = 16 << 20
"""What one call moves, in some 4 ms."""
_NEIGHBOURS_BYTES = 8192
"""Tensors so close to each other are one stretch: malloc puts its own words between them."""
_SHARE = 0.05
"""Moving takes at most this share of a core."""
_RETRY_S = 2.0
"""So long after the others a piece is tried again that has failed, such as one that was just being written."""
_MOST_FAILURES = 4
"""A piece that fails so often in a row, of memory that can't be moved or for want of huge pages, is left alone."""
_AGAIN_S = 60.0
"""So long after all is moved it is looked at again: a fork leaves small pages behind of what is written after it."""

_Numbers = npt.NDArray[np.uint64]


def huge_page_setting() -> str:
    """Return the kernel's setting for anonymous memory: "always", "madvise" or "never"; "never" where it has none."""
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii").split()
    except OSError:
        return "never"
    return next((word.strip("[]") for word in words if word.startswith("[")), "never")


class HugePages:
    """Moves memory that two snapshots in a row have read; memory of one step is not worth it. Does nothing where the
    host's `setting` for huge pages is "never". For one thread at a time.
    """

    def __init__(self, *, setting: str, move: Callable[..., None] = native.move_to_huge_pages) -> None:
        self._is_allowed = setting != "never"
        self._move = move
        self._regions = np.empty((2, 0), np.uint64)
        self._read: set[tuple[int, int]] = set()
        self._gone_through: set[tuple[int, int]] = set()
        self._left: list[tuple[int, int]] = []
        self._failures: dict[tuple[int, int], int] = {}
        self._due_at = self._again_at = 0.0

    def snapshot_read(self, addresses: _Numbers, nbytes: _Numbers) -> None:
        """Note what memory a snapshot has read, which may be gone by now: nbytes[i] at addresses[i], both uint64 [n]."""
        if not self._is_allowed:
            return
        before, regions = self._read, np.stack([addresses, nbytes])
        if not np.array_equal(regions, self._regions):
            self._regions, self._read = regions, set(_stretches(addresses, nbytes))
        both = self._read & before
        if not self._left and both and (both - self._gone_through or time.monotonic() >= self._again_at):
            self._gone_through = both
            self._left = [piece for one in sorted(both) for piece in _pieces(*one)]
            self._failures = {piece: self._failures.get(piece, 0) for piece in self._left}

    def due_s(self) -> float:
        """Return the seconds until the next piece may be moved; infinity when all are."""
        return self._due_at - time.monotonic() if self._left else math.inf

    def move_when_due(self) -> None:
        """Move the next piece, unless this has had its share of the time already."""
        if self.due_s() > 0:
            return
        piece = self._left.pop()
        if self._failures[piece] < _MOST_FAILURES:
            self._move_piece(piece)
        if not self._left:
            may_succeed = any(0 < count < _MOST_FAILURES for count in self._failures.values())
            self._again_at = time.monotonic() + (_RETRY_S if may_succeed else _AGAIN_S)

    def _move_piece(self, piece: tuple[int, int]) -> None:
        began = time.thread_time()
        try:
            self._move(address=piece[0], nbytes=piece[1])
            self._failures[piece] = 0
        except OSError:
            # A device has pinned it, or it is gone, or of a kind that stays, or the host is short of huge pages. What
            # could be moved of the piece is, and pages of any size hold the same bytes.
            self._failures[piece] += 1
        self._due_at = time.monotonic() + (time.thread_time() - began) / _SHARE


def _stretches(addresses: _Numbers, nbytes: _Numbers) -> list[tuple[int, int]]:
    """Return the whole huge pages in this memory, as (address, nbytes) of those side by side."""
    order = np.argsort(addresses)
    begins = addresses[order].astype(np.int64)
    ends = np.maximum.accumulate(begins + nbytes[order].astype(np.int64))
    is_first = np.append(True, begins[1:] > ends[:-1] + _NEIGHBOURS_BYTES)[: len(begins)]
    firsts = np.flatnonzero(is_first)
    begins = -(-begins[firsts] // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    ends = ends[np.append(firsts[1:], len(ends)) - 1] // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return [(begin, end - begin) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) if begin < end]


def _pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    return [(address + at, min(PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PIECE_BYTES)]
