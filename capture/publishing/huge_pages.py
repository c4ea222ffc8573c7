"""Moves the tensors that are written from memory into huge pages, while the training goes on.

Torch's memory is in pages of 4 KiB on most hosts. To write it, the kernel looks up and pins each of them, and the
device gets a request for each MiB; of huge pages it takes one for 512. The kernel can move memory that is in use:
neither its content nor its address changes. While 2 MiB are copied, a thread that touches them waits, and one that maps
memory.
"""

import errno
import math
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import native
from capture.publishing.movable_memory import can_be_moved, movable
from native import HUGE_PAGE_BYTES

__all__ = ["HugePages"]

PAGES_OF_A_PIECE = 8
"""One call moves at most so many huge pages, which takes some 4 ms."""
_NEIGHBOURS_BYTES = 8192
"""Tensors that are no further from each other are taken as one stretch, since malloc puts its own words between them.
"""
_SHARE = 0.05
"""Moving takes at most this share of the time,"""
_MOST_SAVED_S = 1.0
"""and makes up for at most so much time in which it did nothing."""
_SHORTEST_PAUSE_S = 2.0
"""What a device has pinned is tried again after this pause, and each time it fails again after one twice as long,"""
_LONGEST_PAUSE_S = 300.0
"""until the pause is this one, which also follows when the host is short of huge pages."""

_Pages = npt.NDArray[np.int64]
_NONE: _Pages = np.empty(0, np.int64)
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


# The memory that is written while the child lives comes to lie in small pages again.
os.register_at_fork(after_in_parent=_count_fork)


class HugePages:
    """Moves the memory that the last two snapshots have both been written from. The memory of one step is not worth it.

    `move`, `is_possible`, `among` and `clock` are what the host does. For one thread at a time.
    """

    def __init__(
        self,
        *,
        move: Callable[..., None] = native.move_to_huge_pages,
        is_possible: Callable[[], bool] = can_be_moved,
        among: Callable[[_Pages], _Pages] = movable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._move, self._among, self._clock = move, among, clock
        self._is_possible = is_possible()
        self._regions = np.empty((2, 0), np.uint64)
        # All by number, which is the address divided by the size.
        self._written = self._known = self._left = self._later = _NONE
        self._forks = _forks
        self._due_at = self._later_at = -math.inf
        self._pause_s = _SHORTEST_PAUSE_S

    def written_from(self, addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> None:
        """Note from what memory a snapshot has been written: nbytes[i] at addresses[i], both uint64 [n]."""
        if not self._is_possible:
            return
        before, regions = self._written, np.stack([addresses, nbytes])
        if not np.array_equal(regions, self._regions):
            self._regions, self._written = regions, _whole_pages(addresses, nbytes)
        staying = np.intersect1d(before, self._written, assume_unique=True)
        if self._forks != _forks:
            self._forks, self._known = _forks, self._left
        # What the training has let go may be somebody else's memory by now.
        self._known, self._left, self._later = (
            np.intersect1d(pages, staying, assume_unique=True) for pages in (self._known, self._left, self._later)
        )
        new = np.setdiff1d(staying, self._known, assume_unique=True)
        if len(new):
            self._known = np.union1d(self._known, new)
            self._left = np.union1d(self._left, self._among(new))
        if len(self._later) and self._clock() >= self._later_at:
            self._left, self._later = np.union1d(self._left, self._among(self._later)), _NONE

    def due_s(self) -> float:
        """Return the seconds until something may be moved; infinity when nothing is to be."""
        return self._due_at - self._clock() if len(self._left) else math.inf

    def move_when_due(self) -> None:
        """Move as much as there is time for now."""
        while self.due_s() <= 0:
            piece = self._left[: _length_of_first_piece(self._left)]
            self._left = self._left[len(piece) :]
            began = self._clock()
            try:
                self._move(address=int(piece[0]) * HUGE_PAGE_BYTES, nbytes=len(piece) * HUGE_PAGE_BYTES)
            except OSError as error:
                self._failed(piece, error)
            else:
                self._pause_s = _SHORTEST_PAUSE_S
            self._due_at = max(self._due_at, began - _MOST_SAVED_S) + (self._clock() - began) / _SHARE

    def _failed(self, piece: _Pages, error: OSError) -> None:
        if error.errno == errno.EAGAIN:
            if not len(self._later):
                self._later_at = self._clock() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._later = np.union1d(self._later, piece)
        elif error.errno in (errno.ENOMEM, errno.EBUSY):
            # To look for huge pages where there are none is dear, and it may drive other memory out.
            self._later, self._left = np.union1d(self._later, np.union1d(piece, self._left)), _NONE
            self._later_at = self._clock() + _LONGEST_PAUSE_S
        # Anything else says that this memory stays in small pages, which hold the same bytes.


def _whole_pages(addresses: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> _Pages:
    """Return the numbers of the huge pages that lie in these regions and between neighbours among them, in order."""
    if not len(addresses):
        return _NONE
    order = np.argsort(addresses)
    begins = addresses[order].astype(np.int64)
    ends = np.maximum.accumulate(begins + nbytes[order].astype(np.int64))
    firsts = np.flatnonzero(np.append(True, begins[1:] > ends[:-1] + _NEIGHBOURS_BYTES))
    first_pages = -(-begins[firsts] // HUGE_PAGE_BYTES)
    end_pages = ends[np.append(firsts[1:], len(ends)) - 1] // HUGE_PAGE_BYTES
    return np.concatenate([np.arange(first, end) for first, end in zip(first_pages, end_pages, strict=True)])


def _length_of_first_piece(pages: _Pages) -> int:
    """Return how many of the first pages lie side by side, PAGES_OF_A_PIECE at most."""
    first = pages[:PAGES_OF_A_PIECE]
    return int(np.argmin(np.append(np.diff(first) == 1, False))) + 1
