"""Checked Parquet: tables with a checksum of the whole file inside it, readable by any Parquet reader.

A Parquet file is `PAR1`, the row groups, a footer, the footer's length (4 bytes, little endian) and `PAR1`. A reader
finds the footer from the end of the file and everything else through the footer, so bytes right before the footer that
no row group claims are invisible to it. The 16 bytes there are the XXH3-128 of all other bytes of the file. A flipped
bit anywhere is therefore found, without a second file that could get lost or be published apart from the first.

A file is hostile until proven otherwise: `parquet_pages` limits sizes before anything is decompressed, since a few
bytes can stand for gigabytes; strings are limited before each row gets its own; and the schema must be exactly the
expected one.
"""

import io
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from catalog.disk.parquet_pages import decoded_bytes
from catalog.disk.regular_file import read_at_most
from catalog.errors import CorruptError, FormatError
from catalog.records import CHECKSUM_BYTES
from native import checksum

__all__ = ["MAX_ROWS", "MAX_TABLE_BYTES", "decode_checked", "encode_checked", "read_bounded"]

MAX_ROWS = 4_000_000
MAX_FILE_BYTES = 256 << 20
MAX_TABLE_BYTES = 1 << 30
"""The largest size of a decompressed table."""

_MAGIC = b"PAR1"


def read_bounded(path: Path) -> bytes:
    """Read a whole file; FormatError when it is larger than MAX_FILE_BYTES."""
    return read_at_most(path, MAX_FILE_BYTES)


def encode_checked(table: pa.Table, *, metadata: Mapping[str, str]) -> bytes:
    """Return the file's bytes: one row group, compressed with zstd, `metadata` in the footer. Equal input gives equal
    bytes with the same version of pyarrow."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", version="2.6", store_schema=False) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata(dict(sorted(metadata.items())))
    plain = sink.getvalue()
    at = _footer_start(plain, file="table")
    return plain[:at] + checksum(plain) + plain[at:]


def decode_checked(data: bytes, *, schema: pa.Schema, file: str) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows and the metadata of a checked file, which must have exactly the columns of `schema`.

    CorruptError when the checksum differs; FormatError when the file is not of this form, has missing values, more than
    MAX_ROWS rows, or takes more than MAX_TABLE_BYTES once decompressed. The errors name `file`.
    """
    at = _footer_start(data, file=file)
    if at - CHECKSUM_BYTES < len(_MAGIC):
        raise FormatError(f"{file}: too short for a table with a checksum")
    stored = data[at - CHECKSUM_BYTES : at]
    expected = checksum(data[: at - CHECKSUM_BYTES] + data[at:])
    if stored != expected:
        raise CorruptError(
            f"{file}: field checksum: the file says {stored.hex()}, its bytes give {expected.hex()}: the file was "
            "changed or damaged"
        )
    try:
        return _decode(data, schema=schema, file=file)
    except FormatError:
        raise
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        raise FormatError(f"{file}: is not a Parquet table of this format: {error}") from error


def _decode(data: bytes, *, schema: pa.Schema, file: str) -> tuple[pa.Table, dict[str, str]]:
    limits = {"thrift_string_size_limit": 16 << 20, "thrift_container_size_limit": 100_000}
    footer = pq.ParquetFile(pa.BufferReader(data), **limits).metadata
    if footer.num_row_groups > 1 or not 0 <= footer.num_rows <= MAX_ROWS:
        raise FormatError(
            f"{file}: {footer.num_rows} rows in {footer.num_row_groups} row groups; at most {MAX_ROWS} rows in one "
            "group are allowed"
        )
    found = footer.schema.to_arrow_schema()
    if found.names != schema.names or found.types != schema.types:
        raise FormatError(
            f"{file}: field 'schema': the columns are {_columns(found)}, the format has {_columns(schema)}"
        )
    _require_bounded(decoded_bytes(data, footer, file=file), file=file)
    # A dictionary stays one at first, so that a string that stands in all rows is in memory once.
    columns = (footer.schema.column(index) for index in range(footer.num_columns))
    strings = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    reader = pq.ParquetFile(pa.BufferReader(data), read_dictionary=strings, **limits)
    table = reader.read(use_threads=False)
    _require_bounded(table.nbytes + sum(_expanded_bytes(table[name]) for name in schema.names), file=file)
    # Before the cast, which would refuse them too, without a name for the file's reader.
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise FormatError(f"{file}: column {field.name!r} has missing values")
    table = table.replace_schema_metadata(None).cast(schema)
    table.validate(full=True)
    metadata: Mapping[bytes, bytes] = footer.metadata or {}
    return table, {key.decode(): value.decode() for key, value in metadata.items()}


def _require_bounded(nbytes: int, *, file: str) -> None:
    if nbytes > MAX_TABLE_BYTES:
        raise FormatError(f"{file}: takes {nbytes} bytes once decompressed, where {MAX_TABLE_BYTES} are allowed")


def _expanded_bytes(column: pa.ChunkedArray) -> int:
    """Return how many bytes the strings of a column take once each row has its own."""
    total = 0
    for chunk in column.chunks:
        values = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
        if pa.types.is_dictionary(values.type):
            # A row without a value has no index.
            lengths = pc.binary_length(values.dictionary).cast(pa.int64()).take(values.indices)
            total += pc.sum(lengths).as_py() or 0
    return total


def _footer_start(data: bytes, *, file: str) -> int:
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise FormatError(f"{file}: is not a Parquet file, or was cut off")
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if start < len(_MAGIC):
        raise FormatError(f"{file}: the footer's length does not fit the file")
    return start


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)[:2000]
