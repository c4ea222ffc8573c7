"""Packs one block of numbers without loss: transform, byte planes, and an entropy coder for the planes that gain by it.

    elements -> transformed, alone or against a base -> one plane for each byte of an element -> each plane coded

Training state is noise in its low bits and nearly constant in its exponents. Cut into planes, the noise is stored as it
is, which costs nothing to decode, and only the other planes go through zstd. Against a base, which is what the same
tensor was some steps ago, the high bits become zeros. What is best for a block is found out on a sample of it.

A block describes itself:

    byte 0          the version of the encoding, 1
    byte 1          the transform: 0 plain, 1 rotated, 2 xor, 3 rotated_xor, 4 difference, 5 indexed
    byte 2          the bytes of an element, and so the number of planes: 1, 2, 4 or 8
    bytes 3 to 10   the number of raw bytes
    9 bytes a plane its coding (0 stored, 1 zstd, 2 one value, 3 quads) and the number of bytes that it takes
    1 + 4n bytes    of an indexed block only: n, and its n mantissas
    the planes      in order, from the least significant byte on
    the rest        raw bytes behind the last whole element

Quads are for planes of which nearly all bytes are 0, 1 or 2: an entropy coder spends a bit on each symbol at least, and
there a symbol is four bytes. Each has two bits, the first the lowest: its value, or 3 where it is 3 or more; the
others, which are those, follow in order. There are 9 bytes for the coding of the quads, 0 to 2, and the bytes that they
take; the same for the others; 8 bytes for the number of the others; the quads; the others.

Float32 numbers that are the products of bfloat16 numbers with one factor, such as clipped gradients, have at most 128
mantissas. Indexed, a number is its exponent, then its sign and the place of its mantissa in the table, each a byte.

All bits survive: no float is ever computed, so NaN payloads, -0.0 and denormals are bits like all others. A block has
no checksum of its own: whoever stores one keeps the checksum of its bytes beside it.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import native
from catalog.encoding.zstd import decompressed
from catalog.errors import FormatError

__all__ = ["MAX_HEAD_BYTES", "Transform", "is_indexed", "needs_base", "packed", "unpacked"]

_VERSION = 1


class Transform(IntEnum):
    """An element is transformed so before it is cut into planes; each transform has an inverse for all bits."""

    PLAIN = 0
    ROTATED = 1
    XOR = 2
    ROTATED_XOR = 3
    DIFFERENCE = 4
    INDEXED = 5


_TRANSFORMS = {int(transform): transform for transform in Transform}
_ALONE = (Transform.PLAIN, Transform.ROTATED)
_NEEDS_BASE = (Transform.XOR, Transform.ROTATED_XOR, Transform.DIFFERENCE)
_INDEXED_BYTES: Final = 4
"""The bytes of an element that can be indexed."""


class _Coding(IntEnum):
    STORED = 0
    ZSTD = 1
    CONSTANT = 2
    QUADS = 3


_CODINGS = {int(coding): coding for coding in _Coding}

_HEAD = struct.Struct("<BBBQ")
_PLANE = struct.Struct("<BQ")
_COUNT = struct.Struct("<Q")
_QUADS_HEAD_BYTES = 2 * _PLANE.size + _COUNT.size
_ITEMSIZES = (1, 2, 4, 8)
MAX_HEAD_BYTES: Final = _HEAD.size + max(_ITEMSIZES) * _PLANE.size
"""A block takes at most so many bytes beside those that it stands for."""

_Buffer: TypeAlias = bytes | bytearray | memoryview


class _Head(NamedTuple):
    """The beginning of a block: what it says of itself, with the mantissas of an indexed one, each a uint32, and where
    the bytes of its planes begin."""

    transform: Transform
    itemsize: int
    nbytes: int
    planes: tuple[tuple[_Coding, int], ...]
    mantissas: memoryview
    begin: int


def packed(raw: memoryview, *, itemsize: int, base: memoryview | None = None) -> bytes:
    """Return a block from which `unpacked` makes exactly the bytes of `raw`; never much larger than these. Of the
    transforms that are possible it has the one that makes a sample of the block smallest.

    itemsize: the bytes of one element: 1, 2, 4 or 8, else ValueError
    base: as many bytes as `raw`, else ValueError, most like it; who unpacks a block for which `needs_base` says so must
       have them again
    """
    tried = _ALONE if base is None else (*_ALONE, *_NEEDS_BASE)
    return native.pack_block(raw, itemsize=itemsize, transforms=tried, base=base)


def unpacked(block: bytes | memoryview, *, base: memoryview | None = None, into: memoryview) -> None:
    """Write the raw bytes of a block to `into`, which has exactly as many and holds anything after an error.
    FormatError when the block is none, or has another number of raw bytes, or needs a base where there is none of its
    size."""
    content = _bytes_of(block)
    head = _head(content)
    target = into.cast("B")
    if len(target) != head.nbytes:
        raise FormatError(f"packed block: {head.nbytes} raw bytes where {len(target)} belong")
    whole = head.nbytes - head.nbytes % head.itemsize
    other = None
    if head.transform in _NEEDS_BASE:
        if base is None or base.nbytes != head.nbytes:
            found = "none" if base is None else f"one of {base.nbytes} bytes"
            raise FormatError(f"packed block: needs a base of {head.nbytes} bytes, there is {found}")
        other = _bytes_of(base)[:whole]
    planes = []
    at = head.begin
    for coding, nbytes in head.planes:
        planes.append(_decoded(coding, content[at : at + nbytes], whole // head.itemsize))
        at += nbytes
    if head.transform is Transform.INDEXED:
        _join_indexed(planes, head, into=target[:whole])
    elif whole:
        native.join_planes(planes, into=target[:whole], transform=int(head.transform), base=other)
    target[whole:] = content[at:]


def needs_base(block: bytes | memoryview) -> bool:
    """Return whether a block can be unpacked only with a base. FormatError when it is no block."""
    return _head(_bytes_of(block)).transform in _NEEDS_BASE


def is_indexed(block: bytes | memoryview) -> bool:
    """Return whether the elements of a block are indexed."""
    return block[1] == Transform.INDEXED


def _bytes_of(buffer: bytes | memoryview) -> memoryview:
    return memoryview(buffer).cast("B")


def _head(content: memoryview) -> _Head:
    if len(content) < _HEAD.size:
        raise FormatError(f"packed block: {len(content)} bytes, too short for a block")
    version, transform, itemsize, nbytes = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise FormatError(f"packed block: version {version}, this release knows {_VERSION}")
    if transform not in _TRANSFORMS or itemsize not in _ITEMSIZES:
        raise FormatError(f"packed block: transform {transform} of elements of {itemsize} bytes: not one of the format")
    begin = _HEAD.size + itemsize * _PLANE.size
    if len(content) < begin:
        raise FormatError(f"packed block: {len(content)} bytes where the table of its planes ends at {begin}")
    table = [_PLANE.unpack_from(content, _HEAD.size + i * _PLANE.size) for i in range(itemsize)]
    mantissas = content[:0]
    if transform == Transform.INDEXED:
        if itemsize != _INDEXED_BYTES or len(content) == begin:
            raise FormatError(f"packed block: elements of {itemsize} bytes are indexed, or there is no table of theirs")
        mantissas = content[begin + 1 : begin + 1 + _INDEXED_BYTES * content[begin]]
        begin += 1 + _INDEXED_BYTES * content[begin]
    end = begin + sum(length for _, length in table) + nbytes % itemsize
    if end != len(content):
        raise FormatError(f"packed block: {len(content)} bytes where its planes end at {end}")
    if any(coding not in _CODINGS for coding, _ in table):
        raise FormatError("packed block: a plane has a coding that the format does not know")
    planes = tuple((_CODINGS[coding], length) for coding, length in table)
    return _Head(_TRANSFORMS[transform], itemsize, nbytes, planes, mantissas, begin)


def _join_indexed(planes: Sequence[_Buffer], head: _Head, *, into: memoryview) -> None:
    """Make the elements of an indexed block from its planes, of which the first two say nothing."""
    low, high, indices, exponents = planes
    if into and (bytes(low), bytes(high)) != (b"\0", b"\0"):
        raise FormatError("packed block: it is indexed, and the lower planes are not zero")
    try:
        native.join_indexed(indices, exponents, mantissas=head.mantissas, into=into)
    except ValueError as error:
        raise FormatError(f"packed block: {error}") from error


def _decoded(coding: _Coding, content: memoryview, nbytes: int) -> _Buffer:
    """Return a plane of so many bytes, or the one that all of them are."""
    if coding is _Coding.QUADS:
        return _decoded_quads(content, nbytes)
    if coding is _Coding.ZSTD:
        if not nbytes:  # zstd looks no further than the head of such a frame
            raise FormatError("packed block: a frame of zstd stands for no byte")
        return decompressed(content, nbytes=nbytes)
    expected = nbytes if coding is _Coding.STORED else 1
    if len(content) != expected:
        raise FormatError(f"packed block: a plane takes {len(content)} bytes where {expected} belong")
    return content


def _decoded_quads(content: memoryview, nbytes: int) -> bytearray:
    begin = _QUADS_HEAD_BYTES
    if len(content) < begin:
        raise FormatError(f"packed block: quads take {len(content)} bytes where their head has {begin}")
    (count,) = _COUNT.unpack_from(content, 2 * _PLANE.size)
    if count > nbytes:
        raise FormatError(f"packed block: {count} large bytes in a plane of {nbytes}")
    parts: list[_Buffer] = []
    for i, size in enumerate((-(-nbytes // 4), count)):
        coding, length = _PLANE.unpack_from(content, i * _PLANE.size)
        if coding not in _CODINGS or coding == _Coding.QUADS or length > len(content) - begin:
            raise FormatError(f"packed block: quads have a part of coding {coding} and {length} bytes")
        part = _decoded(_CODINGS[coding], content[begin : begin + length], size)
        parts.append(bytes(part) * size if coding == _Coding.CONSTANT else part)
        begin += length
    if begin != len(content):
        raise FormatError(f"packed block: quads take {len(content)} bytes, their parts end at {begin}")
    quads, others = parts
    plane = bytearray(nbytes)
    expected = native.spread_quads(quads, others=others, into=plane)
    if expected != count:
        raise FormatError(f"packed block: {count} large bytes where the quads have {expected}")
    return plane
