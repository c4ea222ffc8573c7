"""Any safetensors reader opens our headers, and anything unlawful is refused with its file and entry."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from catalog.errors import FormatError
from catalog.format.dtypes import DTYPES
from catalog.format.header import (
    MAX_HEADER_BYTES,
    Entry,
    encode_header,
    entries_json,
    header_bytes_needed,
    parse_header,
    read_header,
)

PATH = Path("any.safetensors")
METADATA = {"format": "dshistory-1", "run": "a", "step": "7"}


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    """Draw entries that follow each other, some of size zero."""
    names = draw(st.lists(st.text(min_size=1).filter(_lawful_key), unique=True, max_size=6))
    entries, at = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = DTYPES[dtype]
        for size in shape:
            nbytes *= size
        entries.append(Entry(name, dtype, shape, at, at + nbytes))
        at += nbytes
    return entries


def _lawful_key(name: str) -> bool:
    return name != "__metadata__" and not any(0xD800 <= ord(char) < 0xE000 for char in name)


def _header(tree: Any) -> bytes:
    return (tree if isinstance(tree, str) else json.dumps(tree)).encode()


def _parsed(tree: Any, *, data_bytes: int) -> Any:
    text = _header(tree)
    return parse_header(text, file_bytes=8 + len(text) + data_bytes, path=PATH)


def _one(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(entry_lists(), st.integers(0, 300))
def test_reading_returns_what_was_written(entries: list[Entry], spare: int) -> None:
    data_start = header_bytes_needed(entries, metadata=METADATA) + spare
    header = encode_header([entries_json(entries)], metadata=METADATA, data_start=data_start)
    assert len(header) == data_start
    end = entries[-1].end if entries else 0
    parsed = parse_header(header[8:], file_bytes=data_start + end, path=PATH)
    assert (list(parsed.entries), dict(parsed.metadata), parsed.data_start) == (entries, METADATA, data_start)


@given(entry_lists(), st.data())
def test_a_changed_byte_is_refused_or_read_otherwise_but_never_crashes(
    entries: list[Entry], data: st.DataObject
) -> None:
    header = bytearray(encode_header([entries_json(entries)], metadata=METADATA, data_start=1 << 14))
    header[data.draw(st.integers(8, len(header) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FormatError):
        parse_header(bytes(header[8:]), file_bytes=(1 << 14) + (entries[-1].end if entries else 0), path=PATH)


def test_the_safetensors_library_opens_it(tmp_path: Path) -> None:
    entries = [
        Entry("model/a[2:4]", "BF16", (2,), 0, 4),
        Entry("model/empty", "F32", (0, 3), 4, 4),
        Entry("model/b", "F32", (1, 2), 4, 12),
        Entry("__pad__.0", "U8", (84,), 12, 96),
    ]
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_header([entries_json(entries)], metadata=METADATA, data_start=4096) + bytes(range(96)))
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {entry.key for entry in entries}
        assert file.metadata() == METADATA
        assert file.get_slice("model/b").get_shape() == [1, 2]
    assert read_header(path).entries == tuple(entries)


def test_a_header_that_does_not_fit_its_reserve_is_refused() -> None:
    with pytest.raises(FormatError, match="reserved"):
        encode_header([entries_json([Entry("a" * 100, "U8", (4,), 0, 4)])], metadata={}, data_start=64)


@pytest.mark.parametrize(
    ("tree", "data_bytes", "match"),
    [
        (json.dumps({"a": _one(), "b": _one()}).replace('"b"', '"a"'), 4, "'a' appears twice"),
        ({"a": _one(offsets=(1, 5))}, 5, "gap"),
        ({"a": _one(), "b": _one(offsets=(2, 6))}, 6, "overlaps"),
        ({"a": _one(), "b": _one(offsets=(0, 4))}, 4, "overlaps"),
        ({"a": _one()}, 5, "end at byte 4"),
        ({"a": _one()}, 3, "end at byte 4"),
        ({}, 1, "end at byte 0"),
        ({"a": _one(dtype="F31")}, 4, "F31"),
        ({"a": _one(dtype=None)}, 4, "dtype"),
        ({"a": _one(dtype=["U8"])}, 4, "dtype"),
        ({"a": _one(shape=(5,))}, 4, "takes 5 bytes"),
        ({"a": _one(shape=(-1, -4))}, 4, "natural"),
        ({"a": _one(shape=(True, 4))}, 4, "natural"),
        ({"a": _one(shape=(2.0, 2))}, 4, "natural"),
        ({"a": _one(shape=(1 << 62,) * 3, offsets=(0, 0))}, 0, "natural"),
        ({"a": _one(shape=(1 << 61,) * 9, offsets=(0, 0))}, 0, "takes"),
        ({"a": _one(shape=(1,) * 10_000, offsets=(0, 1))}, 1, "at most 64"),
        ({"a": _one(shape=4)}, 4, "natural"),
        ({"a": _one(offsets=(4, 0))}, 4, "in order"),
        ({"a": _one(offsets=(0, 4, 8))}, 4, "in order"),
        ({"a": _one(offsets="04")}, 4, "natural"),
        ({"a": {**_one(), "extra": 1}}, 4, "must have"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "must have"),
        ({"a": []}, 4, "must have"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
        ({"__metadata__": []}, 0, "__metadata__"),
        ([], 0, "object"),
        ("null", 0, "object"),
        ("{", 0, "JSON"),
        ("[" * 100_000, 0, "JSON"),
        ("", 0, "JSON"),
        (json.dumps({"a": _one(shape=(0,))}).replace("[0]", "[" + "9" * 5000 + "]"), 4, "JSON|natural"),
        ({"a" * 50: _one(shape=(1 << 61,) * 1000)}, 4, "natural"),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused(tree: Any, data_bytes: int, match: str) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        _parsed(tree, data_bytes=data_bytes)
    assert "any.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "length", [0, 1, 1 << 20, MAX_HEADER_BYTES + 1, 1 << 62, (1 << 64) - 1], ids=lambda value: f"{value:x}"
)
def test_an_absurd_length_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
    with pytest.raises(FormatError, match=r"a\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_the_length_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0"[:size])
    with pytest.raises(FormatError, match=r"a\.safetensors"):
        read_header(path)
