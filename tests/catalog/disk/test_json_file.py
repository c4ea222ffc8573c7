"""Canonical JSON files have one form for each content, and any flipped bit is found."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.disk import json_file
from catalog.errors import CorruptError, FormatError

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
CONTENTS = st.dictionaries(st.text().filter(lambda key: key != "checksum"), TREES)
PATH = Path("any.json")


def _encodable(content: object) -> bool:
    try:
        json_file.canonical(content)
    except UnicodeEncodeError:
        return False
    return True


@given(CONTENTS.filter(_encodable))
def test_reading_returns_what_was_written(content: dict[str, object]) -> None:
    assert json_file.decode(json_file.encode(content), path=PATH) == content


@given(CONTENTS.filter(_encodable))
def test_the_order_of_keys_does_not_matter(content: dict[str, object]) -> None:
    assert json_file.encode(dict(reversed(content.items()))) == json_file.encode(content)


def test_a_flipped_bit_anywhere_is_found() -> None:
    data = json_file.encode({"run": "a", "step": 12, "parts": [1.5, None, "é"]})
    for offset in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[offset] ^= 1 << bit
            with pytest.raises(FormatError):
                json_file.decode(bytes(damaged), path=PATH)


@given(CONTENTS.filter(_encodable), st.data())
def test_a_cut_or_lengthened_file_is_refused(content: dict[str, object], data: st.DataObject) -> None:
    encoded = json_file.encode(content)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for damaged in (encoded[:cut], encoded + b" ", b" " + encoded, encoded + encoded):
        with pytest.raises(FormatError):
            json_file.decode(damaged, path=PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"checksum":7}',
        b'{"checksum":"00"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"checksum":"","a":NaN}',
        b'{"checksum":"","a":1,"a":2}',
        b'{"checksum":"","a":"\\ud800"}',
        b"\xff\xfe",
        b'{"checksum":"","a":' + b"9" * 10_000 + b"}",
    ],
)
def test_hostile_files_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"any\.json"):
        json_file.decode(data, path=PATH)


def test_another_form_of_the_same_content_is_refused() -> None:
    data = json_file.encode({"b": 1, "a": 2})
    for other in (data.replace(b",", b", "), data.replace(b'"a"', b'"\\u0061"')):
        with pytest.raises(CorruptError, match="checksum"):
            json_file.decode(other, path=PATH)


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_file.encode({"a": float("nan")})


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(json_file.MAX_JSON_BYTES + 1)
    with pytest.raises(FormatError, match="allowed"):
        json_file.load(path)
