"""Tells which memory of this process the kernel can move into huge pages, and whether it is to."""

import platform
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from native import HUGE_PAGE_BYTES

__all__ = ["can_be_moved", "huge_page_setting", "movable"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MAPPINGS = Path("/proc/self/maps")
_FIRST_KERNEL = (6, 2)
"""The call exists since Linux 6.1, but there it may go on beyond the memory that it was given."""


def huge_page_setting() -> str:
    """Return the kernel's setting for anonymous memory: "always", "madvise" or "never"; "never" where it has none."""
    own = _chosen(f"hugepages-{HUGE_PAGE_BYTES >> 10}kB/enabled")
    return (_chosen("enabled") or "never") if own in ("", "inherit") else own


def can_be_moved() -> bool:
    """Return whether memory in use can be moved into huge pages of HUGE_PAGE_BYTES here, and the host does not forbid
    them.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    is_new = release is not None and tuple(map(int, release.groups())) >= _FIRST_KERNEL
    return is_new and _read("hpage_pmd_size") == str(HUGE_PAGE_BYTES) and huge_page_setting() != "never"


def movable(pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return those of the huge pages, given by their address divided by HUGE_PAGE_BYTES, that lie in private memory
    without a file, each in one mapping. None where the kernel does not list the mappings.
    """
    try:
        lines = _MAPPINGS.read_bytes().split(b"\n")
    except OSError:
        return pages[:0]
    begins: list[int] = []
    ends: list[int] = [0]
    for line in lines:
        where, permissions, _, _, inode = (*line.split(None, 5), b"", b"", b"", b"", b"")[:5]
        if permissions.startswith(b"rw") and permissions.endswith(b"p") and inode == b"0":
            begin, end = where.split(b"-")
            begins.append(int(begin, 16))
            ends.append(int(end, 16))
    index = np.searchsorted(np.array(begins, np.uint64), (pages * HUGE_PAGE_BYTES).astype(np.uint64), side="right")
    return pages[np.array(ends, np.uint64)[index] >= ((pages + 1) * HUGE_PAGE_BYTES).astype(np.uint64)]


def _chosen(name: str) -> str:
    words = _read(name).split()
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _read(name: str) -> str:
    try:
        return (_SETTINGS / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
