"""Memory in small pages, and how much of it is in huge ones."""

import errno
import mmap
import time
from pathlib import Path

import numpy as np
import pytest

import native
from capture.publishing.movable_memory import can_be_moved, huge_page_setting
from native import HUGE_PAGE_BYTES


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return the address and length of the huge pages that have room in this memory."""
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return begin, max(0, (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - begin)


def huge_bytes(*addresses: int) -> int:
    """Return how much is in huge pages of the mappings that hold these addresses."""
    found = 0
    with Path("/proc/self/smaps").open() as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first:
                begin, end = (int(part, 16) for part in first.split("-"))
                is_asked_for = any(begin <= address < end for address in addresses)
            elif first == "AnonHugePages:" and is_asked_for:
                found += int(rest[0]) << 10
    return found


def in_small_pages(nbytes: int) -> np.ndarray:
    """Return private memory, written to, which is in small pages where huge ones are to be asked for. No other memory
    is in its mapping.
    """
    guard = 1 << 20
    memory = mmap.mmap(-1, nbytes + 2 * guard, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE, 0, guard)
    memory.madvise(mmap.MADV_NOHUGEPAGE, guard + nbytes, guard)
    array = np.frombuffer(memory, np.uint8)[guard:-guard]
    array[:] = 1
    return array


def move(address: int, nbytes: int) -> None:
    """Move memory into huge pages, as soon as nothing in the kernel is using it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return native.move_to_huge_pages(address=address, nbytes=nbytes)
        except OSError as error:
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise


def _is_possible() -> bool:
    if not can_be_moved() or huge_page_setting() != "madvise":
        return False
    memory = in_small_pages(4 << 20)
    try:
        move(*whole_pages(memory.ctypes.data, memory.nbytes))
    except OSError:
        return False
    return True


needs_movable_memory = pytest.mark.skipif(
    not _is_possible(),
    reason="needs huge pages on request (transparent_hugepage/enabled: madvise) that are to be had, and Linux 6.2",
)
