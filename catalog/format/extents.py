"""The table of extents: its columns, its conversion to records and back, and the element counts of its shapes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.format.dtypes import MAX_DIMENSIONS
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = ["MAX_FIGURE", "SCHEMA", "element_counts", "extent_records", "extent_table"]

MAX_FIGURE = 1 << 56
"""Every offset, size and count is smaller than this, so that its product with an element's 8 bytes fits 64 bits."""

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("checksum", pa.binary(CHECKSUM_BYTES), nullable=False),
        pa.field("placement", pa.string(), nullable=False),
        pa.field("aliases", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("base", pa.string(), nullable=True),
    ]
)


def extent_table(extents: Sequence[Extent]) -> pa.Table:
    """Return a table with the columns of SCHEMA and one row for each extent, in their order."""
    columns = {
        name: pa.array([getattr(extent, name) for extent in extents], SCHEMA.field(name).type) for name in SCHEMA.names
    }
    return pa.table(columns, schema=SCHEMA)


def extent_records(table: pa.Table) -> list[Extent]:
    """Return the rows of a table with the columns of SCHEMA as records."""
    columns: dict[str, Iterable[Any]] = {name: table[name].to_pylist() for name in SCHEMA.names}
    columns |= {name: map(tuple, columns[name]) for name in ("shape", "aliases")}
    # The fields of Extent are the columns of SCHEMA, in the same order.
    return [Extent(*row) for row in zip(*columns.values(), strict=True)]


def element_counts(shapes: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the number of elements of each shape (int64), or -1 for a shape that no tensor can have: with too many
    dimensions, a size out of range, or MAX_FIGURE elements or more."""
    lists = shapes.combine_chunks() if isinstance(shapes, pa.ChunkedArray) else shapes
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    counts = np.ones(len(lengths), np.int64)
    # The product in int64 may overflow silently. The same product in float64 can't, and shows where it did.
    sizes = np.ones(len(lengths), np.float64)
    valid = lengths <= MAX_DIMENSIONS
    for dimension in range(int(min(lengths.max(initial=0), MAX_DIMENSIONS))):
        rows = np.flatnonzero(lengths > dimension)
        size = values[begins[rows] + dimension]
        valid[rows] &= (size >= 0) & (size < MAX_FIGURE)
        with np.errstate(over="ignore"):
            counts[rows] *= size
            sizes[rows] *= size
    return np.where(valid & (sizes < MAX_FIGURE), counts, -1)
