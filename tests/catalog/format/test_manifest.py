"""Manifests come back as written, and hostile rows are refused before any file is opened because of them."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from catalog_helpers import ALIGN, Piece, data_file_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.disk import checked_parquet
from catalog.disk.checked_parquet import decode_checked, encode_checked
from catalog.errors import CorruptError, FormatError
from catalog.format.extents import SCHEMA, extent_table
from catalog.format.manifest import VERSION, Manifest, bytes_in, decode_manifest, encode_manifest
from catalog.paths import data_file
from catalog.records import Extent

PATH = Path("any.manifest.parquet")
CREATED = datetime.datetime(2026, 11, 21, 10, 15, 2, tzinfo=datetime.UTC)
PIECES = [
    Piece("w", bytes(range(8)), dtype="F32", shape=(2, 2), start=1, placement="partitioned", aliases=("v", "é")),
    Piece("empty", b"", dtype="BF16", shape=(0, 3)),
    Piece("rng", b"{}", kind="object", placement="rank_local"),
]


def _extents(step: int = 7) -> list[Extent]:
    return data_file_bytes(PIECES, step=step)[1]


def _encode(extents: list[Extent], **changed: Any) -> bytes:
    facts: dict[str, Any] = {
        "run": "run-a",
        "step": 7,
        "rank": 0,
        "world_size": 2,
        "layout_hash": "l",
        "created": CREATED,
    }
    facts |= changed
    table = extent_table(extents)
    nbytes = bytes_in(data_file(facts["run"], facts["step"], facts["rank"]), table)
    return encode_manifest(Manifest(**facts, data_bytes=nbytes, table=table))


def _decode(data: bytes) -> Manifest:
    return decode_manifest(data, path=PATH)


def _checked_manifest(rows: list[dict[str, Any]], **changed: str | None) -> bytes:
    """Return a manifest with any rows and facts and a valid checksum, as only a hostile writer would make it."""
    facts: dict[str, str | None] = {
        "dshistory.manifest": VERSION, "run": "run-a", "step": "7", "rank": "0", "world_size": "2", "layout": "l",
        "created": CREATED.isoformat(), "data_bytes": str(2 * ALIGN),
    }  # fmt: skip
    known = {key: value for key, value in (facts | changed).items() if value is not None}
    return encode_checked(pa.Table.from_pylist(rows, schema=SCHEMA), metadata=known)


def _rows() -> list[dict[str, Any]]:
    return [{name: getattr(extent, name) for name in SCHEMA.names} for extent in _extents()]


def test_reading_returns_what_was_written() -> None:
    manifest = _decode(_encode(_extents()))
    assert manifest.extents() == _extents()
    assert (manifest.run, manifest.step, manifest.rank, manifest.world_size, manifest.layout_hash) == (
        "run-a",
        7,
        0,
        2,
        "l",
    )
    assert (manifest.created, manifest.data_bytes, manifest.file) == (CREATED, 2 * ALIGN, data_file("run-a", 7, 0))


def test_the_hostile_writer_of_these_tests_can_write_a_lawful_manifest() -> None:
    assert _decode(_checked_manifest(_rows())).extents() == _extents()


def test_the_same_rows_give_the_same_bytes() -> None:
    assert _encode(_extents()) == _encode(_extents())


def test_any_parquet_reader_opens_it() -> None:
    table = pq.read_table(pa.BufferReader(_encode(_extents())))
    assert table["name"].to_pylist() == [extent.name for extent in _extents()]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    damaged = bytearray(_encode(_extents()))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError, match=r"any\.manifest\.parquet"):
        _decode(bytes(damaged))


def test_a_flipped_bit_in_the_checksum_or_the_rows_is_a_corrupt_file() -> None:
    damaged = bytearray(_encode(_extents()))
    damaged[100] ^= 1
    with pytest.raises(CorruptError, match="field checksum"):
        _decode(bytes(damaged))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    for hostile in (data, b"PAR1" + data, b"PAR1" + data + b"PAR1", _encode(_extents())[: len(data)]):
        with pytest.raises(FormatError):
            _decode(hostile)


HOSTILE_ROWS = [
    (1, {"offset": -1}, "offset"),
    (1, {"offset": 1 << 60}, "offset"),
    (1, {"nbytes": 9}, "nbytes"),
    (1, {"nbytes": -8}, "nbytes"),
    (1, {"numel": 3}, "nbytes"),
    (1, {"numel": 1 << 62, "nbytes": 0}, "numel"),
    (1, {"start": -1}, "start"),
    (1, {"start": 3}, "shape"),
    (1, {"shape": (1,)}, "shape"),
    (1, {"shape": (-2, -2)}, "shape"),
    (1, {"shape": (1 << 60, 1 << 60)}, "shape"),
    (1, {"shape": (2,) * 65}, "shape"),
    (1, {"dtype": "F31"}, "dtype"),
    (1, {"placement": "anywhere"}, "placement"),
    (1, {"codec": "zstd"}, "codec"),
    (1, {"base": "run-a:1"}, "base"),
    (1, {"file": "/etc/passwd"}, "file"),
    (1, {"file": "../outside"}, "file"),
    (1, {"file": "runs/../../outside/steps/000000000007/rank-00000.safetensors"}, "file"),
    (1, {"file": "runs/run-a/steps/000000000007/rank-00000.safetensors\0"}, "file"),
    (1, {"file": ""}, "file"),
    (1, {"file": "history.json"}, "file"),
    (1, {"offset": ALIGN - 4}, "overlaps"),
    (3, {"offset": ALIGN + 12}, "without an owner"),
    (0, {"kind": "pad"}, "header"),
    (1, {"kind": "header"}, "header"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "change", "match"), HOSTILE_ROWS, ids=lambda value: str(value)[:40])
def test_hostile_rows_are_refused(row: int, change: dict[str, Any], match: str) -> None:
    rows = _rows()
    rows[row] |= change
    with pytest.raises(FormatError, match=match) as caught:
        _decode(_checked_manifest(rows))
    assert "any.manifest.parquet" in str(caught.value)


ROUNDED_ROWS = [
    ({"offset": 2 * ALIGN}, "offset"),
    ({"offset": ALIGN + 2}, "offset"),
    ({"offset": ALIGN + 12}, "offset"),
    ({"offset": 0}, "offset"),
    ({"file": "runs/run-a/steps/000000000003/rank-00000.safetensors"}, "offset"),
    ({"base": None}, "base"),
    ({"base": "F64"}, "base"),
    ({"codec": "raw"}, "base"),
    ({"codec": "rounded up"}, "codec"),
    ({"dtype": "I16"}, "dtype"),
    ({"kind": "object_tensor"}, "kind"),
    ({"nbytes": 16}, "nbytes"),
]  # fmt: skip


def _rounded_rows() -> list[dict[str, Any]]:
    """Return rows of a file with four float32 numbers, and a row with two of them, rounded."""
    rows = data_file_bytes([Piece("w", bytes(16), "master", "F32")], step=7)[1]
    weight = replace(rows[1], kind="model", dtype="BF16", shape=(2,), numel=2, nbytes=4)
    weight = replace(weight, offset=weight.offset + 4, codec="rounded", base="F32")
    return [{name: getattr(extent, name) for name in SCHEMA.names} for extent in (*rows, weight)]


def test_a_row_that_is_rounded_needs_no_bytes_of_its_own() -> None:
    assert [row.codec for row in _decode(_checked_manifest(_rounded_rows())).extents()] == ["raw"] * 3 + ["rounded"]


@pytest.mark.parametrize(("change", "match"), ROUNDED_ROWS, ids=lambda value: str(value)[:40])
def test_hostile_rows_that_are_rounded_are_refused(change: dict[str, Any], match: str) -> None:
    rows = _rounded_rows()
    rows[-1] |= change
    with pytest.raises(FormatError, match=f"field {match}"):
        _decode(_checked_manifest(rows))


def test_rows_that_are_rounded_from_the_same_numbers_are_refused() -> None:
    rows = _rounded_rows()
    with pytest.raises(FormatError, match=r"field offset.* overlaps"):
        _decode(_checked_manifest([*rows, {**rows[-1], "name": "v", "offset": rows[-1]["offset"] + 4}]))


@pytest.mark.parametrize(("row", "change", "match"), HOSTILE_ROWS[:10], ids=lambda value: str(value)[:40])
def test_hostile_rows_are_not_written_either(row: int, change: dict[str, Any], match: str) -> None:
    extents = _extents()
    extents[row] = replace(extents[row], **change)
    with pytest.raises(FormatError, match=match):
        _encode(extents)


@pytest.mark.parametrize(
    "change",
    [
        {"dshistory.manifest": "2"},
        {"dshistory.manifest": None},
        {"run": None},
        {"step": "-1"},
        {"step": "07"},
        {"step": "9" * 30},
        {"rank": "x"},
        {"world_size": "1e3"},
        {"created": "yesterday"},
        {"created": "2026-11-21T10:15:02"},
        {"data_bytes": str(2 * ALIGN + 1)},
        {"extra": "1"},
    ],
    ids=str,
)
def test_hostile_facts_are_refused(change: dict[str, str | None]) -> None:
    with pytest.raises(FormatError, match=r"any\.manifest\.parquet"):
        _decode(_checked_manifest(_rows(), **change))


def test_an_empty_manifest_is_refused() -> None:
    for data_bytes in (0, 2 * ALIGN):
        with pytest.raises(FormatError, match="no extent"):
            _decode(_checked_manifest([], data_bytes=str(data_bytes)))


def test_other_columns_are_refused() -> None:
    table = pa.Table.from_pylist(_rows(), schema=SCHEMA)
    for other in (table.drop_columns(["codec"]), table.append_column("extra", table["name"])):
        with pytest.raises(FormatError, match="columns"):
            _decode(encode_checked(other, metadata={"dshistory.manifest": VERSION}))


def test_a_table_that_expands_too_far_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([pa.field("name", pa.string(), nullable=False)])
    bomb = encode_checked(pa.table({"name": pa.array(["x" * 1000] * 20_000)}, schema=schema), metadata={})
    assert len(bomb) < 10_000
    assert decode_checked(bomb, schema=schema, file="bomb")[0].num_rows == 20_000
    monkeypatch.setattr(checked_parquet, "MAX_TABLE_BYTES", 1 << 20)
    with pytest.raises(FormatError, match="once decompressed"):
        decode_checked(bomb, schema=schema, file="bomb")


def test_more_rows_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_parquet, "MAX_ROWS", 3)
    with pytest.raises(FormatError, match="at most 3"):
        _decode(_encode(_extents()))
