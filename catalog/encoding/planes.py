"""Packs one block of numbers without loss: transform, byte planes, and an entropy coder for the planes that gain by it.

    elements -> transformed, alone or against a base -> one plane for each byte of an element -> each plane coded

Training state is noise in its low bits and nearly constant in its exponents. Cut into planes, the noise is stored as it
is, which costs nothing to decode, and only the other planes go through zstd. Against a base, which is what the same
tensor was some steps ago, the high bits become zeros. What is best for a block is found out on a sample of it.

A block describes itself:

    byte 0          the version of the encoding, 1
    byte 1          the transform: 0 plain, 1 rotated, 2 xor, 3 rotated_xor, 4 difference
    byte 2          the bytes of an element, and so the number of planes: 1, 2, 4 or 8
    bytes 3 to 10   the number of raw bytes
    9 bytes a plane its coding (0 stored, 1 zstd, 2 one value, 3 quads) and the number of bytes that it takes
    the planes      in order, from the least significant byte on
    the rest        raw bytes behind the last whole element

Quads (`catalog.encoding.quads`) are two planes in one, in this order: 9 bytes for the coding of the quads, 0 to 2, and
the bytes that they take; the same for the others; 8 bytes for the number of the others; the quads; the others.

All bits survive: no float is ever computed, so NaN payloads, -0.0 and denormals are bits like all others. A block has
no checksum of its own: whoever stores one keeps the checksum of its bytes beside it.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import zstandard

import native
from catalog.encoding.quads import gathered, quad_bytes, spread
from catalog.errors import FormatError

__all__ = ["MAX_HEAD_BYTES", "Transform", "needs_base", "packed", "raw_bytes", "unpacked"]

VERSION = 1


class Transform(IntEnum):
    """What an element becomes before it is cut into planes; each has an inverse for all bits."""

    PLAIN = 0
    ROTATED = 1
    XOR = 2
    ROTATED_XOR = 3
    DIFFERENCE = 4


_TRANSFORMS = {int(transform): transform for transform in Transform}
_ALONE = (Transform.PLAIN, Transform.ROTATED)
_WITH_BASE = (*_ALONE, Transform.XOR, Transform.ROTATED_XOR, Transform.DIFFERENCE)


class _Coding(IntEnum):
    STORED = 0
    ZSTD = 1
    CONSTANT = 2
    QUADS = 3


_CODINGS = {int(coding): coding for coding in _Coding}

_HEAD = struct.Struct("<BBBQ")
_PLANE = struct.Struct("<BQ")
_COUNT = struct.Struct("<Q")
_ITEMSIZES = (1, 2, 4, 8)
MAX_HEAD_BYTES: Final = _HEAD.size + max(_ITEMSIZES) * _PLANE.size
"""A block takes at most so many bytes beside those that it stands for."""

_SAMPLE_PARTS = 4
_SAMPLE_PART_ELEMENTS = 1024
_WORTH_CODING = 0.97
"""A plane that zstd makes hardly smaller is stored: that costs little room, and decoding it nothing."""

_USUAL_BYTES = 1 << 20

_Coder: TypeAlias = int
"""How zstd codes a plane: the logarithm of the number of earlier places that it remembers, to find repetitions."""

_FEW_MATCHES: _Coder = 6
"""Exponents repeat by chance. To say where costs more than to code them one by one, which is all that is left to do."""
_MATCHES: _Coder = 14
"""Runs, as of zeros, are worth finding."""
_IN_QUADS: _Coder = 0
"""Bytes of which nearly all are 0, 1 or 2 are put together first."""

_MAY_BE_QUADS = 0.5
_WORTH_QUADS = 0.95


class _Head(NamedTuple):
    """The beginning of a block: what it says of itself, and where the bytes of its planes begin."""

    transform: Transform
    itemsize: int
    nbytes: int
    planes: tuple[tuple[_Coding, int], ...]
    begin: int


def packed(
    raw: memoryview, *, itemsize: int, base: memoryview | None = None, transform: Transform | None = None
) -> bytes:
    """Return a block from which `unpacked` makes exactly the bytes of `raw`; never much larger than these.

    itemsize: the bytes of one element: 1, 2, 4 or 8
    base: as many bytes as `raw`, most like it; who unpacks a block for which `needs_base` says so must have them again
    transform: by default the one that makes a sample of the block smallest
    """
    if itemsize not in _ITEMSIZES:
        raise ValueError(f"itemsize is {itemsize}: an element has 1, 2, 4 or 8 bytes")
    data = _bytes_of(raw)
    whole = len(data) - len(data) % itemsize
    other = None
    if base is not None:
        other = _bytes_of(base)
        if len(other) != len(data):
            raise ValueError(f"the base has {len(other)} bytes, the block {len(data)}: they must be as many")
        other = other[:whole]
    tried = (_ALONE if base is None else _WITH_BASE) if transform is None else (transform,)
    best, coders = _best(data[:whole], itemsize, other, tried)
    planes = _planes(data[:whole], itemsize, best, other)
    coded = [_coded(plane, coder) for plane, coder in zip(planes, coders, strict=True)]
    head = _HEAD.pack(VERSION, best, itemsize, len(data))
    table = b"".join(_PLANE.pack(coding, len(content)) for coding, content in coded)
    return b"".join([head, table, *(content for _, content in coded), data[whole:]])


def unpacked(block: bytes | memoryview, *, base: memoryview | None = None, into: memoryview) -> None:
    """Write the raw bytes of a block to `into`, which has exactly as many. FormatError when the block is none, or has
    another number of raw bytes, or needs a base where there is none of its size."""
    content = _bytes_of(block)
    head = _head(content)
    target = into.cast("B")
    if len(target) != head.nbytes:
        raise FormatError(f"packed block: {head.nbytes} raw bytes where {len(target)} belong")
    whole = head.nbytes - head.nbytes % head.itemsize
    other = None
    if head.transform not in _ALONE:
        if base is None or base.nbytes != head.nbytes:
            found = "none" if base is None else f"one of {base.nbytes} bytes"
            raise FormatError(f"packed block: needs a base of {head.nbytes} bytes, there is {found}")
        other = _bytes_of(base)[:whole]
    planes = []
    at = head.begin
    for coding, nbytes in head.planes:
        planes.append(_decoded(coding, content[at : at + nbytes], whole // head.itemsize))
        at += nbytes
    if whole:
        native.join_planes(planes, into=target[:whole], transform=int(head.transform), base=other)
    target[whole:] = content[at:]


def needs_base(block: bytes | memoryview) -> bool:
    """Return whether a block can be unpacked only with a base. FormatError when it is no block."""
    return _head(_bytes_of(block)).transform not in _ALONE


def raw_bytes(block: bytes | memoryview) -> int:
    """Return the number of raw bytes of a block. FormatError when it is no block."""
    return _head(_bytes_of(block)).nbytes


def _bytes_of(buffer: bytes | memoryview) -> memoryview:
    return memoryview(buffer).cast("B")


def _head(content: memoryview) -> _Head:
    if len(content) < _HEAD.size:
        raise FormatError(f"packed block: {len(content)} bytes, too short for a block")
    version, transform, itemsize, nbytes = _HEAD.unpack_from(content)
    if version != VERSION:
        raise FormatError(f"packed block: version {version}, this release knows {VERSION}")
    if transform not in _TRANSFORMS or itemsize not in _ITEMSIZES:
        raise FormatError(f"packed block: transform {transform} of elements of {itemsize} bytes: not one of the format")
    begin = _HEAD.size + itemsize * _PLANE.size
    if len(content) < begin:
        raise FormatError(f"packed block: {len(content)} bytes where the table of its planes ends at {begin}")
    table = [_PLANE.unpack_from(content, _HEAD.size + i * _PLANE.size) for i in range(itemsize)]
    end = begin + sum(length for _, length in table) + nbytes % itemsize
    if end != len(content):
        raise FormatError(f"packed block: {len(content)} bytes where its planes end at {end}")
    if any(coding not in _CODINGS for coding, _ in table):
        raise FormatError("packed block: a plane has a coding that the format does not know")
    planes = tuple((_CODINGS[coding], length) for coding, length in table)
    return _Head(_TRANSFORMS[transform], itemsize, nbytes, planes, begin)


def _planes(data: memoryview, itemsize: int, transform: Transform, base: memoryview | None) -> Iterator[memoryview]:
    """Yield each plane of the transformed elements, which hold until this thread's next call."""
    planes = _own.memory(len(data))
    if data:
        native.split_planes(data, into=planes, itemsize=itemsize, transform=int(transform), base=base)
    each = len(data) // itemsize
    for i in range(itemsize):
        yield planes[i * each : (i + 1) * each]


def _best(
    data: memoryview, itemsize: int, base: memoryview | None, tried: Sequence[Transform]
) -> tuple[Transform, Sequence[_Coder | None]]:
    """Return the transform that makes a sample smallest, and what codes each of its planes; None: it is stored."""
    sample = _sample(data, itemsize)
    other = None if base is None else _sample(base, itemsize)
    sizes = {
        transform: [
            min(len(plane), len(_zstd(plane, _FEW_MATCHES))) for plane in _planes(sample, itemsize, transform, other)
        ]
        for transform in tried
    }
    best = min(tried, key=lambda transform: sum(sizes[transform]))
    planes = _planes(sample, itemsize, best, other)
    return best, [_best_coder(plane, few) for plane, few in zip(planes, sizes[best], strict=True)]


def _best_coder(plane: memoryview, few: int) -> _Coder | None:
    """Return what makes a plane smallest, which takes `few` bytes with few matches; None when nothing makes it smaller
    by enough."""
    size, coder = min((few, _FEW_MATCHES), (len(_zstd(plane, _MATCHES)), _MATCHES))
    if size < _MAY_BE_QUADS * len(plane) and len(_quads(plane)) < _WORTH_QUADS * size:
        return _IN_QUADS
    return coder if size < _WORTH_CODING * len(plane) else None


def _sample(data: memoryview, itemsize: int) -> memoryview:
    """Return some of the elements, of all parts of the block; all of a small one."""
    part = _SAMPLE_PART_ELEMENTS * itemsize
    if len(data) <= _SAMPLE_PARTS * part:
        return data
    gap = (len(data) // itemsize - _SAMPLE_PART_ELEMENTS) // (_SAMPLE_PARTS - 1) * itemsize
    return memoryview(b"".join(data[i * gap : i * gap + part] for i in range(_SAMPLE_PARTS)))


def _coded(plane: memoryview, coder: _Coder | None) -> tuple[_Coding, bytes | memoryview]:
    if coder is None:
        return _Coding.STORED, plane
    if len(plane) > 1 and _is_constant(plane):
        return _Coding.CONSTANT, plane[:1]
    if coder == _IN_QUADS:
        coding, content = _Coding.QUADS, _quads(plane)
    else:
        coding, content = _Coding.ZSTD, _zstd(plane, coder)
    return (coding, content) if len(content) < len(plane) else (_Coding.STORED, plane)


def _quads(plane: memoryview) -> bytes:
    quads, others = gathered(plane)
    parts = [_coded(part, _FEW_MATCHES) for part in (quads, others)]
    heads = (_PLANE.pack(coding, len(content)) for coding, content in parts)
    return b"".join([*heads, _COUNT.pack(len(others)), *(content for _, content in parts)])


def _is_constant(plane: memoryview) -> bool:
    values = np.frombuffer(plane, np.uint8)
    return bool(values[0] == values[-1]) and not np.any(values != values[0])


def _decoded(coding: _Coding, content: memoryview, nbytes: int) -> memoryview | pa.Buffer:
    if coding is _Coding.QUADS:
        return _decoded_quads(content, nbytes)
    expected = {_Coding.STORED: nbytes, _Coding.CONSTANT: 1}.get(coding, len(content))
    if len(content) != expected:
        raise FormatError(f"packed block: a plane takes {len(content)} bytes where {expected} belong")
    if coding is _Coding.STORED:
        return content
    if coding is _Coding.CONSTANT:
        return memoryview(bytes(content) * nbytes)
    try:
        return pa.Codec("zstd").decompress(pa.py_buffer(content), decompressed_size=nbytes)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"packed block: a plane can't be decompressed: {error}") from error


def _decoded_quads(content: memoryview, nbytes: int) -> memoryview:
    begin = 2 * _PLANE.size + _COUNT.size
    if len(content) < begin:
        raise FormatError(f"packed block: quads take {len(content)} bytes where their head has {begin}")
    (count,) = _COUNT.unpack_from(content, 2 * _PLANE.size)
    if count > nbytes:
        raise FormatError(f"packed block: {count} large bytes in a plane of {nbytes}")
    parts = []
    for i, size in enumerate((quad_bytes(nbytes), count)):
        coding, length = _PLANE.unpack_from(content, i * _PLANE.size)
        if coding not in _CODINGS or coding == _Coding.QUADS or length > len(content) - begin:
            raise FormatError(f"packed block: quads have a part of coding {coding} and {length} bytes")
        parts.append(memoryview(_decoded(_CODINGS[coding], content[begin : begin + length], size)))
        begin += length
    if begin != len(content):
        raise FormatError(f"packed block: quads take {len(content)} bytes, their parts end at {begin}")
    return spread(*parts, count=nbytes)


class _Own(threading.local):
    """What each thread has for itself: its compressors, and memory for the planes of a block of usual size."""

    def __init__(self) -> None:
        self.by_coder = {coder: _compressor(coder) for coder in (_FEW_MATCHES, _MATCHES)}
        self._planes = memoryview(bytearray(_USUAL_BYTES))

    def memory(self, nbytes: int) -> memoryview:
        return self._planes[:nbytes] if nbytes <= _USUAL_BYTES else memoryview(bytearray(nbytes))


def _compressor(coder: _Coder) -> zstandard.ZstdCompressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=coder, window_log=20)
    return zstandard.ZstdCompressor(compression_params=parameters)


_own = _Own()


def _zstd(plane: memoryview, coder: _Coder) -> bytes:
    return _own.by_coder[coder].compress(plane)
