"""A small file that stands for much memory is refused before the memory is taken, and so is one with missing values."""

import contextlib
import io
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import ROOT

import native
from catalog.disk import checked_parquet
from catalog.disk.checked_parquet import decode_checked, encode_checked
from catalog.errors import FormatError, HistoryError

LIMIT = 4 << 20
SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("note", pa.string(), nullable=True),
        pa.field("shape", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
        pa.field("aliases", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False),
    ]
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Lower the limit to 4 MiB, and measure what Arrow takes from here on."""
    monkeypatch.setattr(checked_parquet, "MAX_TABLE_BYTES", LIMIT)
    before = pa.default_memory_pool()
    measured = pa.proxy_memory_pool(before)
    pa.set_memory_pool(measured)
    yield measured.max_memory
    pa.set_memory_pool(before)


def _columns(rows: int) -> dict[str, pa.Array]:
    return {
        "name": pa.array(["a"] * rows),
        "number": pa.array(range(rows), pa.int64()),
        "note": pa.array([None] * rows, pa.string()),
        "shape": pa.array([[1, 2]] * rows, SCHEMA.field("shape").type),
        "aliases": pa.array([["b"]] * rows, SCHEMA.field("aliases").type),
    }


def _long_string_in_every_row() -> dict[str, pa.Array]:
    return _columns(2000) | {"name": pa.DictionaryArray.from_arrays(pa.array([0] * 2000), pa.array(["x" * 100_000]))}


def _long_string_in_every_list() -> dict[str, pa.Array]:
    columns = _columns(2000)
    values = pa.array(["x" * 100_000]).take(pa.array([0] * 100))
    columns["aliases"] = pa.ListArray.from_arrays(pa.array([0] * 2000 + [100], pa.int32()), values)
    return columns


def _one_endless_list() -> dict[str, pa.Array]:
    numbers = pa.array([7]).take(pa.array([0] * 1_000_000))
    return _columns(1) | {"shape": pa.ListArray.from_arrays(pa.array([0, 1_000_000], pa.int32()), numbers)}


def _one_page_of_zeros() -> dict[str, pa.Array]:
    return _columns(1) | {"name": pa.array(["0" * (20 << 20)])}


@pytest.mark.guards("Nothing is unpickled")
@pytest.mark.parametrize(
    "columns", [_long_string_in_every_row, _long_string_in_every_list, _one_endless_list, _one_page_of_zeros]
)
def test_a_small_file_takes_no_more_than_the_limit(
    columns: Callable[[], dict[str, pa.Array]], taken: Callable[[], int]
) -> None:
    data = _file(columns())
    assert len(data) < 10_000
    before = taken()
    with pytest.raises(FormatError, match=f"once decompressed, where {LIMIT} are allowed"):
        decode_checked(data, schema=SCHEMA, file="bomb")
    assert taken() - before < LIMIT


def _file(columns: dict[str, pa.Array], **options: object) -> bytes:
    """Return a checked file as a stranger can make it: with the right types, and a dictionary where he likes."""
    fields = [pa.field(name, column.type, SCHEMA.field(name).nullable) for name, column in columns.items()]
    fields[3:] = list(SCHEMA)[3:]
    table = pa.table(list(columns.values()), schema=pa.schema(fields))
    sink = io.BytesIO()
    options = {"row_group_size": table.num_rows, "compression": "zstd", "store_schema": False, **options}
    pq.write_table(table, sink, version="2.6", **options)
    return _checked(sink.getvalue())


def _checked(plain: bytes) -> bytes:
    at = len(plain) - 8 - int.from_bytes(plain[-8:-4], "little")
    return plain[:at] + native.checksum(plain) + plain[at:]


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}])
def test_what_fits_is_read(options: dict[str, object]) -> None:
    columns = _columns(1000) | {"note": pa.array(["x", None] * 500)}
    table, _ = decode_checked(_file(columns, **options), schema=SCHEMA, file="table")
    assert table.equals(pa.table(list(columns.values()), schema=SCHEMA))


def test_an_encoding_that_makes_values_of_earlier_ones_is_refused() -> None:
    """Each value of DELTA_BYTE_ARRAY may repeat the one before it and add a byte: a page grows with its square."""
    data = _file(_columns(100), use_dictionary=False, column_encoding={"name": "DELTA_BYTE_ARRAY"})
    with pytest.raises(FormatError, match=r"column 'name'.*encoding"):
        decode_checked(data, schema=SCHEMA, file="table")


def test_a_page_with_more_values_than_the_file_has_rows_is_refused() -> None:
    data = _file(_columns(63), use_dictionary=False, compression="none")
    at = _footer(data)
    plain = data[: at - 16] + data[at:]
    # Field 1 of the first page's header for data, the number of values, is 63 as a zigzag varint of one byte.
    header = plain.index(b"\x2c\x15\x7e", 4)
    forged = plain[: header + 2] + b"\x7c" + plain[header + 3 :]
    with pytest.raises(FormatError, match="column 'name': the pages have 62 values, the file has 63 rows"):
        decode_checked(_checked(forged), schema=SCHEMA, file="table")


def _footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def test_any_damage_under_a_right_checksum_is_refused_or_harmless(taken: Callable[[], int]) -> None:
    chance = random.Random(11)
    good = encode_checked(pa.table(list(_columns(50).values()), schema=SCHEMA), metadata={"a": "b"})
    at = _footer(good)
    plain = good[: at - 16] + good[at:]
    before = taken()
    for _ in range(400):
        content = bytearray(plain)
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(4, len(content) - 8)] = chance.randrange(256)
        with contextlib.suppress(HistoryError):
            decode_checked(_checked(bytes(content)), schema=SCHEMA, file="table")
    assert taken() - before < 2 * LIMIT


def test_a_missing_value_is_refused_where_the_format_has_none() -> None:
    strict = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("m", pa.int64(), nullable=True)])
    loose = pa.schema([pa.field(name, pa.int64()) for name in strict.names])
    for row, allowed in (({"n": 1, "m": None}, True), ({"n": None, "m": 1}, False)):
        data = encode_checked(pa.Table.from_pylist([row], schema=loose), metadata={})
        if allowed:
            assert decode_checked(data, schema=strict, file="x")[0].to_pylist() == [row]
        else:
            with pytest.raises(FormatError, match=r"^x: column 'n' has missing values$"):
                decode_checked(data, schema=strict, file="x")


@pytest.mark.guards("Nothing is unpickled")
def test_a_footer_that_contradicts_itself_does_not_end_the_process(tmp_path: Path) -> None:
    """A column whose values may be missing, and which the footer then says are never: pyarrow's accessor aborts."""
    schema = pa.schema([pa.field("x", pa.float64(), nullable=True)])
    whole = encode_checked(pa.table({"x": [0.5, None]}, schema=schema), metadata={})
    at = _footer(whole)
    may_be_missing, is_there = b"\x25\x02\x18\x01x", b"\x25\x00\x18\x01x"
    assert whole.count(may_be_missing, at) == 1
    plain = whole[: at - 16] + whole[at:].replace(may_be_missing, is_there)
    path = tmp_path / "table"
    path.write_bytes(_checked(plain))
    program = (
        "import sys, pyarrow as pa; from pathlib import Path; from catalog.disk.checked_parquet import decode_checked\n"
        "schema = pa.schema([pa.field('x', pa.float64())])\n"
        "decode_checked(Path(sys.argv[1]).read_bytes(), schema=schema, file='table')"
    )
    done = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1].split(":")[:2]) == (
        1,
        ["catalog.errors.FormatError", " table"],
    )


def test_a_footer_that_says_a_thing_twice_is_refused() -> None:
    whole = encode_checked(pa.table({"x": [0.5, 1.5]}), metadata={})
    at = _footer(whole)
    # The number of rows, the third field, comes again as what is written as the field 3 by its number.
    rows_twice = whole[at : len(whole) - 9] + b"\x06\x06\x04" + b"\0"
    plain = whole[: at - 16] + rows_twice + len(rows_twice).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(FormatError, match="has field 3 twice"):
        decode_checked(_checked(plain), schema=pa.schema([pa.field("x", pa.float64())]), file="table")
