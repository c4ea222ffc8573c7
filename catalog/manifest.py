"""A rank's manifest: a Parquet table with one row per extent, header and padding included.

The schema is declared and versioned; nothing is inferred. Reading treats the file as hostile: every figure is checked
before anything is opened because of it.
"""

import io
from collections.abc import Sequence
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from catalog.errors import CorruptError, FormatError
from catalog.layout import DTYPES
from catalog.records import Extent

__all__ = ["NOT_STATE", "SCHEMA", "decode_manifest", "encode_manifest", "read_manifest"]

NOT_STATE = frozenset({"header", "pad", "object", "object_tensor"})
"""Kinds of extents that are no tensor of the model."""

SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30
MAX_ROWS = 20_000_000
MAX_DIMENSIONS = 64

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("checksum", pa.binary(16), nullable=False),
        pa.field("placement", pa.string(), nullable=False),
        pa.field("aliases", pa.list_(pa.string()), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("base", pa.string(), nullable=True),
    ]
)
_PLACEMENTS = frozenset({"partitioned", "replicated", "rank_local"})


def encode_manifest(
    extents: Sequence[Extent], *, run: str, step: int, rank: int, world_size: int, layout: str
) -> bytes:
    """The file's bytes. Run id, step, rank, world size and layout hash stand in the table's metadata, so that the
    marker can refuse strangers.
    """
    columns = {
        name: pa.array([getattr(extent, name) for extent in extents], SCHEMA.field(name).type) for name in SCHEMA.names
    }
    facts = {
        "dshistory.manifest": str(SCHEMA_VERSION),
        "run": run,
        "step": str(step),
        "rank": str(rank),
        "world_size": str(world_size),
        "layout": layout,
    }
    table = pa.table(columns, schema=SCHEMA.with_metadata(facts))
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=max(1, len(extents)),
        use_dictionary=["kind", "dtype", "placement", "codec", "file"],
    )
    return sink.getvalue()


def read_manifest(path: Path) -> tuple[list[Extent], dict[str, str]]:
    """The rows and the table's facts (run, step, rank, world_size, layout), all checked except against other files."""
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: {size} bytes where at most {MAX_MANIFEST_BYTES} are allowed")
    return decode_manifest(path.read_bytes(), path=path)


def decode_manifest(data: bytes, *, path: Path) -> tuple[list[Extent], dict[str, str]]:
    """As `read_manifest`, from bytes already read."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        if file.metadata.num_rows > MAX_ROWS:
            raise FormatError(f"{path}: {file.metadata.num_rows} rows where at most {MAX_ROWS} are allowed")
        table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{path}: not readable as a Parquet manifest: {error}") from error
    facts = {key.decode(): value.decode(errors="replace") for key, value in (table.schema.metadata or {}).items()}
    version = facts.get("dshistory.manifest")
    if version != str(SCHEMA_VERSION):
        raise FormatError(f"{path}: field dshistory.manifest: version {version}, this release reads {SCHEMA_VERSION}")
    if not table.schema.remove_metadata().equals(SCHEMA.remove_metadata()):
        raise FormatError(f"{path}: the columns are {table.schema.names}, a manifest has {SCHEMA.names}")
    extents = [_extent(row, f"{path}: row {index}") for index, row in enumerate(table.to_pylist())]
    return extents, facts


def _extent(row: dict[str, Any], where: str) -> Extent:
    where = f"{where} ({row['kind']}/{row['name']})"
    if any(value is None for key, value in row.items() if key != "base"):
        raise FormatError(f"{where}: a field is empty")
    for field in ("start", "numel", "offset", "nbytes"):
        if not 0 <= row[field] < 1 << 62:
            raise FormatError(f"{where}: field {field}: {row[field]} is out of range")
    if row["dtype"] not in DTYPES:
        raise FormatError(f"{where}: field dtype: {row['dtype']!r} is not one of {', '.join(DTYPES)}")
    if row["placement"] not in _PLACEMENTS:
        raise FormatError(
            f"{where}: field placement: {row['placement']!r} is not one of {', '.join(sorted(_PLACEMENTS))}"
        )
    if len(row["shape"]) > MAX_DIMENSIONS or any(size is None or not 0 <= size < 1 << 62 for size in row["shape"]):
        raise FormatError(f"{where}: field shape: {row['shape']} is not a shape")
    if row["start"] + row["numel"] > prod(row["shape"]):
        raise FormatError(
            f"{where}: field numel: [{row['start']}, {row['start'] + row['numel']}) leaves a tensor of shape {row['shape']}"
        )
    if row["codec"] != "raw":
        raise FormatError(f"{where}: field codec: {row['codec']!r} is not known to this release")
    if row["nbytes"] != row["numel"] * DTYPES[row["dtype"]]:
        raise FormatError(
            f"{where}: field nbytes: {row['nbytes']}, {row['numel']} elements of {row['dtype']} take {row['numel'] * DTYPES[row['dtype']]}"
        )
    pure = PurePosixPath(row["file"])
    if pure.is_absolute() or not pure.parts or any(part in ("..", ".") for part in pure.parts) or "\0" in row["file"]:
        raise FormatError(f"{where}: field file: {row['file']!r} leaves the history")
    return Extent(**{**row, "shape": tuple(row["shape"]), "aliases": tuple(row["aliases"])})
