"""Moves the tensors that are written from memory into huge pages, while the training goes on.

Torch's memory is in pages of 4 KiB on most hosts. To write it, the kernel looks up and pins each of them, and the
device gets a request for each MiB; of huge pages it takes one for 512. The kernel can move memory that is in use:
neither its content nor its address changes. While 2 MiB are copied, a thread that touches them waits, and one that maps
memory.
"""

import errno
import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import native
from capture.data_file.in_place import InPlace
from capture.publishing.movable_memory import can_be_moved, movable
from native import HUGE_PAGE_BYTES

__all__ = ["PAGES_OF_A_PIECE", "HugePages"]

PAGES_OF_A_PIECE = 8
"""One call moves at most so many huge pages, which takes some 4 ms."""
_NEIGHBOURS_BYTES = 8192
"""Tensors no further from each other are taken as one stretch, since malloc puts its own words between them."""
_SHARE = 0.05
"""Moving takes at most this share of the time."""
_MOST_SAVED_S = 1.0
"""Its share of so much time may be taken at once, when it was not taken before."""
_SHORTEST_PAUSE_S = 2.0
"""A piece that was pinned in a round is tried again after this pause, and then after ever longer ones."""
_LONGEST_PAUSE_S = 300.0
"""No pause is longer, and a host that is short of huge pages is left in peace for so long."""

_Pages = npt.NDArray[np.int64]
_NONE: _Pages = np.empty(0, np.int64)


class HugePages:
    """Moves the memory that two snapshots in a row were written from, and that the training changed between them. The
    memory of one step is not worth it, and what does not change may be shared with a forked child, so that moving would
    copy it.

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
        self._before = InPlace(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, "V16"))
        # Pages by their number, which is the address divided by the size. All these are in order.
        self._present = self._known = _NONE
        self._left: deque[_Pages] = deque()
        self._pinned: list[_Pages] = []
        self._forks = 0
        self._due_at = self._retry_at = -math.inf
        self._pause_s = _SHORTEST_PAUSE_S

    def stop(self) -> None:
        """Move nothing more."""
        self._is_possible = False
        self._left.clear()

    def written_from(self, memory: InPlace, *, forks: int) -> None:
        """Note from what `memory` a snapshot was written, before whose beginning there were so many `forks`."""
        if not self._is_possible:
            return
        before, self._before = self._before, memory
        self._present = _whole_pages(memory.addresses, memory.nbytes)
        if forks != self._forks:
            # What the training has changed since the fork lies in small pages now.
            self._forks = forks
            self._known = _NONE
            self._left.clear()
            self._pinned.clear()
        self._known = np.intersect1d(self._known, self._present, assume_unique=True)
        changed = memory.changed_since(before)
        new = np.setdiff1d(_whole_pages(memory.addresses[changed], memory.nbytes[changed]), self._known)
        if len(new):
            self._known = np.union1d(self._known, new)
            self._left.extend(_pieces(self._among(new)))
        if self._pinned and not self._left and self._clock() >= self._retry_at:
            self._left.extend(self._pinned)
            self._pinned.clear()

    def due_s(self) -> float:
        """Return the seconds until something may be moved; infinity when nothing is to be."""
        return self._due_at - self._clock() if self._left else math.inf

    def move_when_due(self) -> None:
        """Move as much as there is time for now."""
        while self.due_s() <= 0:
            piece = self._left.popleft()
            there = piece[_are_in(piece, self._present)]
            if len(there) < len(piece):
                # What the training has let go may be somebody else's memory by now.
                self._left.extendleft(reversed(_pieces(there)))
                continue
            began = self._clock()
            pause_s = 0.0
            try:
                self._move(address=int(piece[0]) * HUGE_PAGE_BYTES, nbytes=len(piece) * HUGE_PAGE_BYTES)
            except OSError as error:
                pause_s = self._failed(piece, error)
            took = self._clock() - began
            self._due_at = max(max(self._due_at, began - _MOST_SAVED_S) + took / _SHARE, self._clock() + pause_s)
            if not self._left:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if self._pinned else _SHORTEST_PAUSE_S

    def _failed(self, piece: _Pages, error: OSError) -> float:
        """Return for how long nothing is to be moved after this."""
        if error.errno == errno.EAGAIN:
            self._pinned.append(piece)
            self._retry_at = self._clock() + self._pause_s
        elif error.errno in (errno.ENOMEM, errno.EBUSY):
            there = self._among(piece)
            self._left.extendleft(reversed(_pieces(there)))
            if len(there) == len(piece):
                # To look for huge pages where there are none is dear, and it may drive other memory out.
                return _LONGEST_PAUSE_S
        elif len(piece) > 1:
            # The kernel stops at the first mapping in which it moves nothing.
            self._left.extendleft(piece[i : i + 1] for i in reversed(range(len(piece))))
        # Anything else says that this memory stays in small pages, which hold the same bytes.
        return 0.0


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
    whole = first_pages < end_pages
    stretches = zip(first_pages[whole].tolist(), end_pages[whole].tolist(), strict=True)
    return np.concatenate([_NONE, *(np.arange(first, end) for first, end in stretches)])


def _pieces(pages: _Pages) -> list[_Pages]:
    """Return the pages in pieces of PAGES_OF_A_PIECE at most that lie side by side."""
    stretches = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
    return [one[i : i + PAGES_OF_A_PIECE] for one in stretches for i in range(0, len(one), PAGES_OF_A_PIECE)]


def _are_in(some: _Pages, pages: _Pages) -> npt.NDArray[np.bool_]:
    """Return for each of some pages whether it is among the others, which are in order."""
    found: npt.NDArray[np.bool_] = np.searchsorted(pages, some, side="right") > np.searchsorted(pages, some)
    return found
