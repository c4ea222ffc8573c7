"""Bytes of which nearly all are 0, 1 or 2, four of them in one: an entropy coder spends a bit on each symbol at least,
and here a symbol is four bytes.

    quads     one byte for four bytes, two bits each, the first in the lowest: its value, or 3 where it is 3 or more
    others    the bytes that are 3 or more, in order
"""

import numpy as np

from catalog.errors import FormatError

__all__ = ["gathered", "quad_bytes", "spread"]

_OTHER = 3
_SPREAD = np.array([[byte >> shift & 3 for shift in (0, 2, 4, 6)] for byte in range(256)], np.uint8).view("<u4")[:, 0]


def quad_bytes(count: int) -> int:
    """Return the number of quads of so many bytes."""
    return -(-count // 4)


def gathered(plane: memoryview) -> tuple[memoryview, memoryview]:
    """Return the quads of a plane, and the others."""
    values = np.frombuffer(plane, np.uint8)
    small = np.zeros(4 * quad_bytes(values.size), np.uint8)
    np.minimum(values, _OTHER, out=small[: values.size])
    words = small.view("<u4")
    quads = (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8)
    return quads.data, values[values >= _OTHER].data


def spread(quads: memoryview, others: memoryview, *, count: int) -> memoryview:
    """Return the plane of `count` bytes. FormatError when there are more others, or fewer, than its quads say."""
    plane = _SPREAD[np.frombuffer(quads, np.uint8)].view(np.uint8)[:count]
    where = plane == _OTHER
    expected = int(np.count_nonzero(where))
    if expected != len(others):
        raise FormatError(f"packed block: {len(others)} large bytes where the quads have {expected}")
    plane[where] = np.frombuffer(others, np.uint8)
    return plane.data
