"""Tells which memory of this process the kernel can move into huge pages, and whether it is to."""

import platform
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from native import HUGE_PAGE_BYTES

__all__ = ["can_be_moved", "huge_page_setting", "movable"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_FIRST_KERNEL = (6, 2)
"""The call exists since Linux 6.1, but there it may go on beyond the memory that it was given."""


def huge_page_setting() -> str:
    """Return the kernel's setting for anonymous memory: "always", "madvise" or "never"; "never" where it has none."""
    return "never" if _chosen(f"hugepages-{HUGE_PAGE_BYTES >> 10}kB/enabled") == "never" else _chosen("enabled")


def can_be_moved() -> bool:
    """Return whether memory in use can be moved into huge pages of HUGE_PAGE_BYTES here, and the host does not forbid
    them.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = release is not None and tuple(map(int, release.groups())) >= _FIRST_KERNEL
    return is_new and _read("hpage_pmd_size") == str(HUGE_PAGE_BYTES) and huge_page_setting() != "never"


def movable(pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return those of the huge pages, given by their address divided by HUGE_PAGE_BYTES, that lie in memory of this
    process alone, and in one mapping of it. What belongs to a file or to other processes too is not moved.
    """
    ends: list[int] = []
    begins: list[int] = []
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            where, permissions, _, _, inode, *_ = line.split()
            if permissions.startswith("rw") and permissions.endswith("p") and inode == "0":
                begin, end = where.split("-")
                begins.append(int(begin, 16))
                ends.append(int(end, 16))
    index = np.searchsorted(np.array(begins, np.uint64), (pages * HUGE_PAGE_BYTES).astype(np.uint64), side="right")
    ends_before = np.array([0, *ends], np.uint64)
    return pages[ends_before[index] >= ((pages + 1) * HUGE_PAGE_BYTES).astype(np.uint64)]


def _chosen(name: str) -> str:
    words = _read(name).split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "never" if name == "enabled" else "")


def _read(name: str) -> str:
    try:
        return (_SETTINGS / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
