"""Tells which memory of this process is in huge pages."""

import mmap
from pathlib import Path

import numpy as np
import pytest

import native
from capture.publishing.huge_pages import huge_page_setting

HUGE_PAGE = 2 << 20


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return the address and length of the huge pages that have room in this memory."""
    begin = -(-address // HUGE_PAGE) * HUGE_PAGE
    return begin, max(0, (address + nbytes) // HUGE_PAGE * HUGE_PAGE - begin)


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
    """Return private memory, written to, which is in small pages on every host."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    memory.madvise(mmap.MADV_HUGEPAGE)
    return array


def _is_movable() -> bool:
    memory = in_small_pages(4 << 20)
    try:
        native.move_to_huge_pages(address=whole_pages(memory.ctypes.data, memory.nbytes)[0], nbytes=HUGE_PAGE)
    except OSError:
        return False
    return huge_page_setting() != "never"


needs_movable_memory = pytest.mark.skipif(
    not _is_movable(), reason="needs huge pages, and a kernel that moves memory into them (Linux 6.1)"
)
