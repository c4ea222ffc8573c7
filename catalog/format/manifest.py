"""A rank's manifest: a checksummed Parquet file with one row per extent, the header and padding included.

The schema is declared and versioned; nothing is inferred. The reader treats the file as hostile: it checks every value
before it opens any file that the manifest names. Each byte of the rank's data file belongs to exactly one row of the
codec `raw`. A row of the codec `rounded` has no bytes of its own: it names those of another row, which it rounds.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from catalog.disk.checked_parquet import decode_checked, encode_checked
from catalog.errors import FormatError
from catalog.format.dtypes import DTYPES, ROUNDED_DTYPES, ROUNDED_FROM
from catalog.format.extents import MAX_FIGURE, SCHEMA, element_counts, extent_records
from catalog.paths import data_file, parse_data_file
from catalog.records import Extent

__all__ = ["NOT_STATE", "Manifest", "bytes_in", "decode_manifest", "encode_manifest"]

NOT_STATE = frozenset({"header", "pad", "object", "object_tensor"})
"""The kinds of extents that are not tensors of the model."""

VERSION = "1"
_PLACEMENTS = ("partitioned", "rank_local", "replicated")
_CODECS = ("raw", "rounded")
_FIELDS = frozenset({"dshistory.manifest", "run", "step", "rank", "world_size", "layout", "created", "data_bytes"})


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A manifest, whose rows are checked when it is encoded or decoded. `table` has the columns of
    `catalog.format.extents.SCHEMA`; `data_bytes` is the size of the rank's own data file."""

    run: str
    step: int
    rank: int
    world_size: int
    layout_hash: str
    created: datetime
    data_bytes: int
    table: pa.Table

    @property
    def file(self) -> str:
        """Name of the rank's own data file, relative to the history's root."""
        return data_file(self.run, self.step, self.rank)

    def extents(self) -> list[Extent]:
        """Return the rows as records."""
        return extent_records(self.table)


def bytes_in(file: str, table: pa.Table) -> int:
    """Return the size of a data file whose every byte is in one of the extents of `table`."""
    own = table.filter(pc.equal(table["file"], file))
    return int(pc.max(pc.add(own["offset"], own["nbytes"])).as_py() or 0)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's bytes.

    The rows pass the same checks as in `decode_manifest`, so that no manifest is published that a reader would refuse:
    FormatError names row and field.
    """
    where = f"manifest of {manifest.file}"
    _check_rows(manifest.table, file=manifest.file, data_bytes=manifest.data_bytes, where=where)
    metadata = {
        "dshistory.manifest": VERSION,
        "run": manifest.run,
        "step": str(manifest.step),
        "rank": str(manifest.rank),
        "world_size": str(manifest.world_size),
        "layout": manifest.layout_hash,
        "created": manifest.created.isoformat(timespec="microseconds"),
        "data_bytes": str(manifest.data_bytes),
    }
    return encode_checked(manifest.table, metadata=metadata)


def decode_manifest(data: bytes, *, path: Path) -> Manifest:
    """Return the manifest in a file's bytes, with every check that needs no other file.

    FormatError names row and field; CorruptError says that the checksum differs.
    """
    table, metadata = decode_checked(data, schema=SCHEMA, file=str(path))
    version = metadata.get("dshistory.manifest")
    if version != VERSION:
        raise FormatError(f"{path}: field dshistory.manifest: version {version}, this release reads {VERSION}")
    if metadata.keys() != _FIELDS:
        raise FormatError(f"{path}: the fields are {sorted(metadata)}, a manifest has {sorted(_FIELDS)}")
    try:
        manifest = Manifest(
            run=metadata["run"],
            step=_natural(metadata["step"]),
            rank=_natural(metadata["rank"]),
            world_size=_natural(metadata["world_size"]),
            layout_hash=metadata["layout"],
            created=datetime.fromisoformat(metadata["created"]),
            data_bytes=_natural(metadata["data_bytes"]),
            table=table,
        )
    except ValueError as error:
        raise FormatError(f"{path}: a field is not what it must be: {error}") from error
    if manifest.created.tzinfo is None:
        raise FormatError(f"{path}: field created: {metadata['created']!r} has no time zone")
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
        in_range = pc.and_(pc.greater_equal(column, 0), pc.less(column, MAX_FIGURE))
        _demand(table, in_range, field, where, "is out of range")
    for field, allowed in (("dtype", tuple(DTYPES)), ("placement", _PLACEMENTS), ("codec", _CODECS)):
        _demand(table, pc.is_in(table[field], pa.array(allowed)), field, where, f"is not one of {', '.join(allowed)}")
    sizes = pc.take(pa.array(DTYPES.values(), pa.int64()), pc.index_in(table["dtype"], pa.array(DTYPES.keys())))
    exact = pc.equal(table["nbytes"], pc.multiply(table["numel"], sizes))
    _demand(table, exact, "nbytes", where, "is not numel times the dtype's size")
    rounded = pc.equal(table["codec"], "rounded")
    bases = pc.if_else(rounded, pc.fill_null(pc.equal(table["base"], ROUNDED_FROM), False), pc.is_null(table["base"]))
    _demand(table, bases, "base", where, f"is not {ROUNDED_FROM} for the codec rounded, or not missing for raw")
    data_files = pa.array([name for name in pc.unique(table["file"]).to_pylist() if parse_data_file(name)], pa.string())
    _demand(table, pc.is_in(table["file"], data_files), "file", where, "is no data file inside the history")
    capacity = pa.array(element_counts(table["shape"]))
    fits = pc.less_equal(pc.add(table["start"], table["numel"]), capacity)
    _demand(table, fits, "shape", where, "does not hold [start, start + numel)")
    raw = table.filter(pc.invert(rounded))
    _check_cover(raw.filter(pc.equal(raw["file"], file)), data_bytes=data_bytes, where=where)
    _check_rounded(table.filter(rounded), raw, where=where)


def _check_rounded(rounded: pa.Table, raw: pa.Table, *, where: str) -> None:
    """Check that what is to be rounded lies in one row that has it as it is, so that whoever keeps, packs and verifies
    the bytes of the raw rows has all bytes."""
    if not rounded.num_rows:
        return
    allowed = pc.is_in(rounded["dtype"], pa.array(ROUNDED_DTYPES))
    _demand(
        rounded, allowed, "dtype", where, f"is not one of {', '.join(ROUNDED_DTYPES)}, to which numbers are rounded"
    )
    _demand(
        rounded, pc.invert(pc.is_in(rounded["kind"], pa.array(sorted(NOT_STATE)))), "kind", where, "is never rounded"
    )
    sources = raw.filter(pc.equal(raw["dtype"], ROUNDED_FROM))
    _, files = np.unique(_files(sources) + _files(rounded), return_inverse=True)
    of_source, of_rounded = np.split(files, [sources.num_rows])
    begins, ends = _range(rounded, DTYPES[ROUNDED_FROM] * rounded["numel"].to_numpy())
    first, last = _range(sources, sources["nbytes"].to_numpy())
    order = np.lexsort((last, first, of_source))
    of_source, first, last = of_source[order], first[order], last[order]
    inside, apart = np.zeros(rounded.num_rows, bool), np.ones(rounded.num_rows, bool)
    by_file = np.lexsort((begins, of_rounded))
    for rows in np.split(by_file, np.flatnonzero(np.diff(of_rounded[by_file])) + 1):
        here = slice(*np.searchsorted(of_source, [of_rounded[rows[0]], of_rounded[rows[0]] + 1]))
        at = np.searchsorted(first[here], begins[rows], side="right") - 1
        known = at >= 0
        skipped = begins[rows[known]] - first[here][at[known]]
        inside[rows[known]] = (skipped % DTYPES[ROUNDED_FROM] == 0) & (ends[rows[known]] <= last[here][at[known]])
        apart[rows[1:]] = ends[rows[:-1]] <= begins[rows[1:]]
    _demand(rounded, pa.array(inside), "offset", where, f"is no place in the bytes of one row of {ROUNDED_FROM}")
    _demand(rounded, pa.array(apart), "offset", where, "overlaps the numbers of another row that is rounded")


def _files(table: pa.Table) -> list[str]:
    found: list[str] = table["file"].to_pylist()
    return found


def _range(table: pa.Table, nbytes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where the bytes of each row begin and end in their file."""
    begins: npt.NDArray[np.int64] = table["offset"].to_numpy()
    return begins, begins + nbytes


def _check_cover(own: pa.Table, *, data_bytes: int, where: str) -> None:
    """Check that the rows of the rank's own file follow each other without gap or overlap, from the header at byte 0 to
    the last byte. FormatError names the first row that does not."""
    if not own.num_rows:
        raise FormatError(f"{where}: has no extent of its own file, at least its header")
    order = own.sort_by([("offset", "ascending"), ("nbytes", "ascending")])
    begins = order["offset"].to_numpy()
    ends = begins + order["nbytes"].to_numpy()
    expected = np.concatenate([[0], ends[:-1]])
    wrong = np.flatnonzero(begins != expected)
    if len(wrong):
        row, at = order.slice(int(wrong[0]), 1).to_pylist()[0], int(expected[wrong[0]])
        what = "overlaps the extent before it" if row["offset"] < at else "leaves bytes before it without an owner"
        raise FormatError(f"{where}: field offset of {row['kind']}/{row['name']}: {row['offset']} {what} (byte {at})")
    is_header = pc.equal(order["kind"], "header").to_numpy()
    wrong = np.flatnonzero(is_header != (np.arange(len(is_header)) == 0))
    if len(wrong):
        row = order.slice(int(wrong[0]), 1).to_pylist()[0]
        raise FormatError(
            f"{where}: field kind of {row['kind']}/{row['name']}: exactly the first extent of a file is its header"
        )
    if ends[-1] != data_bytes:
        raise FormatError(f"{where}: field data_bytes: {data_bytes}, but the extents end at byte {ends[-1]}")


def _demand(table: pa.Table, good: pa.ChunkedArray | pa.Array, field: str, where: str, what: str) -> None:
    """Raise FormatError for the first row that is not `good`, naming the row, the field and its value."""
    if pc.all(good, min_count=0).as_py():
        return
    index = pc.index(good, False).as_py()
    row = table.slice(index, 1).to_pylist()[0]
    raise FormatError(
        f"{where}: row {index} ({row['kind']}/{row['name']}): field {field}: {str(row[field])[:200]!r} {what}"
    )
