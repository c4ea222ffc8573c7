"""Bytes of which nearly all are 0, 1 or 2, four of them in one: an entropy coder spends a bit on each symbol at least,
and here a symbol is four bytes.

    quads     one byte for four bytes, two bits each, the first in the lowest: its value, or 3 where it is 3 or more
    others    the bytes that are 3 or more, in order
"""

from typing import TypeAlias

import native
from catalog.errors import FormatError

__all__ = ["Buffer", "gathered", "quad_bytes", "spread"]

Buffer: TypeAlias = bytes | bytearray | memoryview


def quad_bytes(count: int) -> int:
    """Return the number of quads of so many bytes."""
    return -(-count // 4)


def gathered(plane: Buffer) -> tuple[bytes, bytes]:
    """Return the quads of a plane, and the others."""
    return native.gather_quads(plane)


def spread(quads: Buffer, others: Buffer, *, count: int) -> bytearray:
    """Return the plane of `count` bytes. FormatError when there are more others, or fewer, than its quads say."""
    plane = bytearray(count)
    expected = native.spread_quads(quads, others=others, into=plane)
    if expected != len(others):
        raise FormatError(f"packed block: {len(others)} large bytes where the quads have {expected}")
    return plane
