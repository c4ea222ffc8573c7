"""The safetensors header of a data file: encoded into a reserved length, and parsed strictly.

The parser is stricter than other readers of the format: it refuses duplicate keys, gaps, overlaps, trailing bytes and
absurd lengths.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from catalog.disk.regular_file import open_regular
from catalog.errors import FormatError
from catalog.format.dtypes import DTYPES, MAX_DIMENSIONS

__all__ = [
    "HEADER_LENGTH_BYTES",
    "Entry",
    "Header",
    "encode_header",
    "entries_json",
    "header_bytes_needed",
    "parse_header",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000
HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the header. `begin` and `end` are byte offsets relative to the end of the header."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `data_start` is the offset in the file of the first byte of data."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    data_start: int


def entries_json(entries: Iterable[Entry]) -> bytes:
    """Return these entries as JSON without the outer braces: a fragment that `encode_header` joins with others."""
    tree = {
        entry.key: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
        for entry in entries
    }
    return _dumps(tree)[1:-1]


def header_bytes_needed(entries: Iterable[Entry], *, metadata: Mapping[str, str]) -> int:
    """Return the smallest `data_start` that these entries fit in."""
    return HEADER_LENGTH_BYTES + len(_text([entries_json(entries)], metadata))


def encode_header(fragments: Iterable[bytes], *, metadata: Mapping[str, str], data_start: int) -> bytes:
    """Return exactly `data_start` bytes: the length, the JSON of the fragments (`entries_json`) in order, and spaces.

    FormatError when the fragments do not fit.
    """
    text = _text(fragments, metadata)
    reserved = data_start - HEADER_LENGTH_BYTES
    if len(text) > reserved:
        raise FormatError(f"the header needs {len(text)} bytes where {reserved} were reserved")
    return reserved.to_bytes(HEADER_LENGTH_BYTES, "little") + text.ljust(reserved, b" ")


def _text(fragments: Iterable[bytes], metadata: Mapping[str, str]) -> bytes:
    first = _dumps({"__metadata__": dict(metadata)})[1:-1]
    return b"{" + b",".join([first, *(fragment for fragment in fragments if fragment)]) + b"}"


def _dumps(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def read_header(path: Path) -> Header:
    """Parse the header of a data file and check it against the file's size. FormatError names the field that is
    wrong."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size - HEADER_LENGTH_BYTES):
            raise FormatError(f"{path}: field header length: {length} bytes in a file of {size}")
        text = file.read(length)
    return parse_header(text, file_bytes=size, path=path)


def parse_header(text: bytes, *, file_bytes: int, path: Path) -> Header:
    """Parse the JSON part of a header; the errors name `path`. FormatError when the entries do not cover exactly the
    bytes of the file after the header, or break another rule of the format."""
    try:
        tree = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: field header: not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise FormatError(f"{path}: field header: not a JSON object")
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: field __metadata__: must map strings to strings")
    data_start = HEADER_LENGTH_BYTES + len(text)
    entries = tuple(_entry(key, value, path) for key, value in tree.items())
    _check_cover(sorted(entries, key=lambda entry: (entry.begin, entry.end)), file_bytes - data_start, path)
    return Header(entries, metadata, data_start)


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"{path}: field header: the key {twice!r} appears twice")
    return tree


def _entry(key: str, value: Any, path: Path) -> Entry:
    where = f"{path}: header entry {key!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where}: dtype {str(dtype)[:100]!r} is not one of {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(
            f"{where}: shape {str(shape)[:200]} and data_offsets {str(offsets)[:200]} must be lists of natural "
            f"numbers, in order, a shape of at most {MAX_DIMENSIONS}"
        )
    if prod(shape) * DTYPES[dtype] != offsets[1] - offsets[0]:
        raise FormatError(
            f"{where}: {dtype} of shape {shape} takes {prod(shape) * DTYPES[dtype]} bytes, data_offsets span "
            f"{offsets[1] - offsets[0]}"
        )
    return Entry(key, dtype, tuple(shape), offsets[0], offsets[1])


def _naturals(value: Any) -> bool:
    """Return whether `value` is a short list of natural numbers below 2^62, so that a hostile file can't make the
    product of a shape expensive."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    )


def _check_cover(entries: list[Entry], data_bytes: int, path: Path) -> None:
    at = 0
    for entry in entries:
        if entry.begin != at:
            what = "overlaps the one before" if entry.begin < at else "leaves a gap before it"
            raise FormatError(f"{path}: header entry {entry.key!r}: begins at {entry.begin}, {what} (byte {at})")
        at = entry.end
    if at != data_bytes:
        raise FormatError(f"{path}: the header's entries end at byte {at} of the data, the file has {data_bytes}")
