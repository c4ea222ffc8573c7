"""A rank's manifest: a sealed Parquet table with one row per extent, header and padding included.

The schema is declared and versioned; nothing is inferred. Reading treats the file as hostile: every figure is checked
before anything is opened because of it. Each byte of the rank's data file belongs to exactly one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import prod
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import FormatError
from catalog.layout import DTYPES, MAX_DIMENSIONS, data_file, parse_data_file
from catalog.records import Extent
from catalog.sealed import decode_sealed, encode_sealed

__all__ = ["NOT_STATE", "SCHEMA", "Manifest", "decode_manifest", "encode_manifest"]

NOT_STATE = frozenset({"header", "pad", "object", "object_tensor"})
"""Kinds of extents that are no tensor of the model."""

VERSION = "1"
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
_PLACEMENTS = ("partitioned", "rank_local", "replicated")
_FACTS = frozenset({"dshistory.manifest", "run", "step", "rank", "world_size", "layout", "created", "data_bytes"})


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A manifest whose rows have been checked; `table` has the columns of SCHEMA."""

    run: str
    step: int
    rank: int
    world_size: int
    layout: str
    created: datetime
    data_bytes: int
    table: pa.Table

    @property
    def file(self) -> str:
        """The rank's own data file, relative to the history's root."""
        return data_file(self.run, self.step, self.rank)

    def extents(self) -> list[Extent]:
        """The rows as records."""
        columns = [self.table[name].to_pylist() for name in SCHEMA.names]
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


def encode_manifest(
    extents: Sequence[Extent], *, run: str, step: int, rank: int, world_size: int, layout: str, created: datetime
) -> bytes:
    """The file's bytes. FormatError when a reader would refuse them: nothing is published that can't be read."""
    file = data_file(run, step, rank)
    table = pa.table(
        {
            name: pa.array([getattr(extent, name) for extent in extents], SCHEMA.field(name).type)
            for name in SCHEMA.names
        },
        schema=SCHEMA,
    )
    data_bytes = max((extent.offset + extent.nbytes for extent in extents if extent.file == file), default=0)
    _check_rows(table, file=file, data_bytes=data_bytes, where=f"manifest of {file}")
    metadata = {
        "dshistory.manifest": VERSION,
        "run": run,
        "step": str(step),
        "rank": str(rank),
        "world_size": str(world_size),
        "layout": layout,
        "created": created.isoformat(timespec="microseconds"),
        "data_bytes": str(data_bytes),
    }
    return encode_sealed(table, metadata=metadata)


def decode_manifest(data: bytes, *, path: Path) -> Manifest:
    """The manifest of a file's bytes, checked except against other files. FormatError names row and field, CorruptError
    a seal that does not fit."""
    table, facts = decode_sealed(data, schema=SCHEMA, file=str(path))
    version = facts.get("dshistory.manifest")
    if version != VERSION:
        raise FormatError(f"{path}: field dshistory.manifest: version {version}, this release reads {VERSION}")
    if facts.keys() != _FACTS:
        raise FormatError(f"{path}: the fields are {sorted(facts)}, a manifest has {sorted(_FACTS)}")
    try:
        manifest = Manifest(
            run=facts["run"],
            step=_natural(facts["step"]),
            rank=_natural(facts["rank"]),
            world_size=_natural(facts["world_size"]),
            layout=facts["layout"],
            created=datetime.fromisoformat(facts["created"]),
            data_bytes=_natural(facts["data_bytes"]),
            table=table,
        )
    except ValueError as error:
        raise FormatError(f"{path}: a field is not what it must be: {error}") from error
    if manifest.created.tzinfo is None:
        raise FormatError(f"{path}: field created: {facts['created']!r} has no time zone")
    _check_rows(table, file=manifest.file, data_bytes=manifest.data_bytes, where=str(path))
    return manifest


def _natural(text: str) -> int:
    value = int(text)
    if not 0 <= value < MAX_FIGURE or str(value) != text:
        raise ValueError(f"{text!r} is not a natural number")
    return value


def _check_rows(table: pa.Table, *, file: str, data_bytes: int, where: str) -> None:
    for field in ("start", "numel", "offset", "nbytes"):
        column = table[field]
        _demand(
            table, pc.and_(pc.greater_equal(column, 0), pc.less(column, MAX_FIGURE)), field, where, "is out of range"
        )
    for field, lawful in (("dtype", tuple(DTYPES)), ("placement", _PLACEMENTS), ("codec", ("raw",))):
        _demand(table, pc.is_in(table[field], pa.array(lawful)), field, where, f"is not one of {', '.join(lawful)}")
    sizes = pc.take(pa.array(DTYPES.values(), pa.int64()), pc.index_in(table["dtype"], pa.array(DTYPES.keys())))
    exact = pc.equal(table["nbytes"], pc.multiply(table["numel"], sizes))
    _demand(table, exact, "nbytes", where, "is not numel times the dtype's size")
    _demand(table, pc.is_null(table["base"]), "base", where, "stands beside the codec raw")
    known = pa.array([name for name in pc.unique(table["file"]).to_pylist() if parse_data_file(name)], pa.string())
    _demand(table, pc.is_in(table["file"], known), "file", where, "is no data file inside the history")
    columns = (table[name].to_pylist() for name in ("shape", "start", "numel"))
    fits = [
        len(shape) <= MAX_DIMENSIONS and all(0 <= size < MAX_FIGURE for size in shape) and start + numel <= prod(shape)
        for shape, start, numel in zip(*columns, strict=True)
    ]
    _demand(table, pa.array(fits, pa.bool_()), "shape", where, "does not hold [start, start + numel)")
    _check_cover(table.filter(pc.equal(table["file"], file)), data_bytes=data_bytes, where=where)


def _check_cover(own: pa.Table, *, data_bytes: int, where: str) -> None:
    """The rows of the rank's own file lie one behind the other, from its first byte, the header, to its last."""
    if not own.num_rows:
        raise FormatError(f"{where}: has no extent of its own file, at least its header")
    order = own.sort_by([("offset", "ascending"), ("nbytes", "ascending")])
    at = 0
    rows = zip(*(order[name].to_pylist() for name in ("kind", "name", "offset", "nbytes")), strict=True)
    for index, (kind, name, offset, nbytes) in enumerate(rows):
        if offset != at:
            what = "overlaps the extent before it" if offset < at else "leaves bytes before it without an owner"
            raise FormatError(f"{where}: field offset of {kind}/{name}: {offset} {what} (byte {at})")
        if (kind == "header") != (index == 0):
            raise FormatError(f"{where}: field kind of {kind}/{name}: exactly the first extent of a file is its header")
        at = offset + nbytes
    if at != data_bytes:
        raise FormatError(f"{where}: field data_bytes: {data_bytes}, but the extents end at byte {at}")


def _demand(table: pa.Table, good: pa.ChunkedArray | pa.Array, field: str, where: str, what: str) -> None:
    if pc.all(good, min_count=0).as_py():
        return
    index = pc.index(good, False).as_py()
    row = table.slice(index, 1).to_pylist()[0]
    raise FormatError(
        f"{where}: row {index} ({row['kind']}/{row['name']}): field {field}: {str(row[field])[:200]!r} {what}"
    )
