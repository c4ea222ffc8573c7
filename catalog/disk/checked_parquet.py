"""Sealed Parquet: tables that prove themselves, and any Parquet reader opens.

A Parquet file is `PAR1`, the row groups, a footer, the footer's length (4 bytes, little endian) and `PAR1`. The 16 bytes right before the
footer, which no reader looks at, are the XXH3-128 of all other bytes of the file. So a flipped bit anywhere is found without a second file.
"""

import io
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from catalog.errors import CorruptError, FormatError
from native import checksum

__all__ = ["MAX_ROWS", "MAX_TABLE_BYTES", "decode_sealed", "encode_sealed", "read_bounded"]

MAX_ROWS = 4_000_000
MAX_FILE_BYTES = 256 << 20
MAX_TABLE_BYTES = 1 << 30
"""The most memory that a table may take once decompressed."""

_MAGIC = b"PAR1"
_SEAL_BYTES = 16
_BATCH_ROWS = 16_384


def read_bounded(path: Path) -> bytes:
    """The bytes of a sealed file; FormatError when it is larger than any may be."""
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(f"{path}: larger than the {MAX_FILE_BYTES} bytes that are allowed")
    return data


def encode_sealed(table: pa.Table, *, metadata: Mapping[str, str]) -> bytes:
    """The file's bytes: one row group, zstd, `metadata` in the schema. Equal input gives equal bytes with one version of pyarrow."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", version="2.6", store_schema=False) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata(dict(sorted(metadata.items())))
    plain = sink.getvalue()
    at = _footer_start(plain, file="table")
    return plain[:at] + checksum(plain) + plain[at:]


def decode_sealed(data: bytes, *, schema: pa.Schema, file: str) -> tuple[pa.Table, dict[str, str]]:
    """(rows, metadata) of a sealed file with exactly the columns of `schema`; bounded in rows and memory, whatever the file says."""
    at = _footer_start(data, file=file)
    if at - _SEAL_BYTES < len(_MAGIC):
        raise FormatError(f"{file}: too short for a sealed table")
    stored = data[at - _SEAL_BYTES : at]
    expected = checksum(data[: at - _SEAL_BYTES] + data[at:])
    if stored != expected:
        raise CorruptError(
            f"{file}: field 'seal' is {stored.hex()} but the bytes have {expected.hex()}; the file was changed or damaged"
        )
    try:
        return _decode(data, schema=schema, file=file)
    except (pa.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise FormatError(f"{file}: is not a Parquet table of this format: {error}") from error


def _decode(data: bytes, *, schema: pa.Schema, file: str) -> tuple[pa.Table, dict[str, str]]:
    reader = pq.ParquetFile(
        pa.BufferReader(data), thrift_string_size_limit=16 << 20, thrift_container_size_limit=100_000
    )
    facts = reader.metadata
    if facts.num_row_groups > 1 or not 0 <= facts.num_rows <= MAX_ROWS:
        raise FormatError(
            f"{file}: {facts.num_rows} rows in {facts.num_row_groups} row groups; at most {MAX_ROWS} in one are allowed"
        )
    found = reader.schema_arrow
    if found.names != schema.names or found.types != schema.types:
        raise FormatError(
            f"{file}: field 'schema': the columns are {_columns(found)}, the format has {_columns(schema)}"
        )
    batches: list[pa.RecordBatch] = []
    taken = 0
    for batch in reader.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
        taken += batch.nbytes
        if taken > MAX_TABLE_BYTES:
            raise FormatError(f"{file}: takes more than {MAX_TABLE_BYTES} bytes once decompressed")
        batches.append(batch)
    table = pa.Table.from_batches(batches, schema=found).replace_schema_metadata(None).cast(schema)
    table.validate(full=True)
    for field in schema:
        if not field.nullable and table[field.name].null_count:
            raise FormatError(f"{file}: column {field.name!r} has missing values")
    metadata: Mapping[bytes, bytes] = facts.metadata or {}
    return table, {key.decode(): value.decode() for key, value in metadata.items()}


def _footer_start(data: bytes, *, file: str) -> int:
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise FormatError(f"{file}: is not a Parquet file, or was cut off")
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if start < len(_MAGIC):
        raise FormatError(f"{file}: the footer's length does not fit the file")
    return start


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)[:2000]
