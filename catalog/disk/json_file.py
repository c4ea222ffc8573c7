"""Canonical JSON files that contain their own checksum.

The bytes are a pure function of the content: sorted keys, no spaces, UTF-8, no NaN. The field `checksum` is the
XXH3-128, in hex, of the canonical bytes without this field. Since the reader accepts the canonical form alone, it finds
a flipped bit anywhere in the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import native
from catalog.disk.regular_file import read_at_most
from catalog.errors import CorruptError, FormatError

__all__ = ["canonical", "decode", "encode", "load", "read_bytes"]

MAX_JSON_BYTES = 64 << 20


def canonical(value: Any) -> bytes:
    """Return the one JSON form of `value`; ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def encode(content: Mapping[str, Any]) -> bytes:
    """Return the file's bytes for `content`, which must not have a field `checksum`."""
    return canonical({**content, "checksum": native.checksum(canonical(content)).hex()})


def decode(data: bytes, *, path: Path) -> dict[str, Any]:
    """Return the content of a file's bytes. FormatError when they are not a file of a history, CorruptError when they
    are not JSON, not canonical, or differ from the checksum.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: not readable as JSON ({error}): restore the file from a copy") from error
    if not isinstance(value, dict) or not isinstance(value.get("checksum"), str):
        raise FormatError(f"{path}: field checksum: missing; this is not a file of a history")
    stored = value.pop("checksum")
    try:
        actual = native.checksum(canonical(value)).hex()
        rewritten = encode(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not canonical JSON: {error}") from error
    if stored != actual or rewritten != data:
        raise CorruptError(
            f"{path}: field checksum: the file says {stored}, its content gives {actual}: the file was changed or "
            "damaged"
        )
    return value


def load(path: Path) -> dict[str, Any]:
    """Read and check one file. FileNotFoundError when it does not exist; FormatError and CorruptError as in
    `decode`."""
    return decode(read_bytes(path), path=path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of one file, unchecked. FileNotFoundError when it does not exist; FormatError when it has more
    than such a file may have."""
    return read_at_most(path, MAX_JSON_BYTES)
