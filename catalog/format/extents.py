"""Extents as a table and as records, and what their shapes come to."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.paths import MAX_DIMENSIONS
from catalog.records import Extent

__all__ = ["MAX_FIGURE", "SCHEMA", "element_counts", "extent_records", "extent_table"]

MAX_FIGURE = 1 << 56
"""No offset, size or count is as large; with 8 bytes an element the products still fit 64 bits."""

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
        pa.field("checksum", pa.binary(16), nullable=False),
        pa.field("placement", pa.string(), nullable=False),
        pa.field("aliases", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("base", pa.string(), nullable=True),
    ]
)


def extent_table(extents: Sequence[Extent]) -> pa.Table:
    """A row for each extent, in order, with the columns of SCHEMA."""
    columns = {
        name: pa.array([getattr(extent, name) for extent in extents], SCHEMA.field(name).type) for name in SCHEMA.names
    }
    return pa.table(columns, schema=SCHEMA)


def extent_records(table: pa.Table) -> list[Extent]:
    """The rows of a table with the columns of SCHEMA."""
    columns = [table[name].to_pylist() for name in SCHEMA.names]
    return [
        Extent(
            name,
            kind,
            dtype,
            tuple(shape),
            start,
            numel,
            file,
            offset,
            nbytes,
            checksum,
            placement,
            tuple(aliases),
            codec,
            base,
        )
        for name, kind, dtype, shape, start, numel, file, offset, nbytes, checksum, placement, aliases, codec, base in zip(
            *columns, strict=True
        )
    ]


def element_counts(shapes: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The number of elements of each shape; -1 for a shape that no tensor can have: too many dimensions, a size out of
    range, or more than MAX_FIGURE elements.
    """
    lists = shapes.combine_chunks() if isinstance(shapes, pa.ChunkedArray) else shapes
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    counts = np.ones(len(lengths), np.int64)
    # Beside the product in integers one that can't overflow: it tells where the first one did.
    sizes = np.ones(len(lengths), np.float64)
    lawful = lengths <= MAX_DIMENSIONS
    for dimension in range(int(min(lengths.max(initial=0), MAX_DIMENSIONS))):
        rows = np.flatnonzero(lengths > dimension)
        size = values[begins[rows] + dimension]
        lawful[rows] &= (size >= 0) & (size < MAX_FIGURE)
        with np.errstate(over="ignore"):
            counts[rows] *= size
            sizes[rows] *= size
    return np.where(lawful & (sizes < MAX_FIGURE), counts, -1)
