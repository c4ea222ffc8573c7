"""Statistics files: statistics of a checkpoint's fragments, stored so that the data need not be read again.

Each rank and step has one checksummed Parquet file. All files of a run are in one folder, so that one listing shows
which steps have statistics. The files are derived from the data files: a checkpoint is complete without them, and they
can be computed at any time.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog.disk.checked_parquet import decode_checked, encode_checked, read_bounded
from catalog.disk.durable import make_dirs, publish_bytes
from catalog.errors import FormatError
from catalog.paths import HistoryPaths
from catalog.records import CHECKSUM_BYTES

__all__ = [
    "SCHEMA",
    "SKETCH_SEED",
    "StatisticsFile",
    "merged_statistics",
    "parse_name",
    "publish_statistics",
    "read_merged",
    "read_statistics",
]

VERSION = "1"
SKETCH_SEED = "DSHistor"

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("placement", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("checksum", pa.binary(CHECKSUM_BYTES), nullable=False),
        pa.field("nan", pa.int64(), nullable=False),
        pa.field("inf", pa.int64(), nullable=False),
        pa.field("zeros", pa.int64(), nullable=False),
        pa.field("min", pa.float64(), nullable=True),
        pa.field("max", pa.float64(), nullable=True),
        pa.field("sum", pa.float64(), nullable=False),
        pa.field("sum_of_squares", pa.float64(), nullable=False),
        pa.field("exponents", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
        pa.field("sketch", pa.list_(pa.field("element", pa.float64(), nullable=False)), nullable=False),
    ]
)
"""One row for each fragment; `checksum` is that of the fragment's bytes. `min` and `max` leave out NaN and are null
when no other value is left. `sum`, `sum_of_squares`, `exponents` and `sketch` leave out everything that is not finite.
`sketch` is empty for a tensor without one."""

_EXPONENTS = (64,)
_SKETCHES = (0, 16, 32, 64, 128, 256)
"""The lengths that lists of these columns may have."""

_NAME = re.compile(r"([0-9]{12})-([0-9]{5})-of-([0-9]{5})\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class StatisticsFile:
    """The part of a checkpoint that one statistics file describes."""

    step: int
    rank: int
    world_size: int

    @property
    def name(self) -> str:
        """Name of the file in the run's folder of statistics."""
        return f"{self.step:012d}-{self.rank:05d}-of-{self.world_size:05d}.parquet"


def parse_name(name: str) -> StatisticsFile | None:
    """Return the part that a file with this name describes, or None when it is not the name of a statistics file."""
    match = _NAME.fullmatch(name)
    return StatisticsFile(int(match[1]), int(match[2]), int(match[3])) if match else None


def publish_statistics(paths: HistoryPaths, run: str, about: StatisticsFile, rows: pa.Table) -> Path:
    """Write the statistics of one rank's part of a checkpoint durably, unless they exist already; return the path.

    `rows` has the columns of SCHEMA.
    """
    folder = paths.statistics_dir(run)
    make_dirs(folder, root=paths.root)
    path = folder / about.name
    if not path.exists():
        publish_bytes(encode_checked(rows.cast(SCHEMA), metadata=_metadata(run, about)), path)
    return path


def read_statistics(path: Path, *, run: str) -> pa.Table:
    """Read the rows of a file, with the columns of SCHEMA. CorruptError when the file is damaged, FormatError when it
    has another version, belongs to another run or part, or has lists of a length that the format does not know."""
    about = parse_name(path.name)
    if about is None:
        raise FormatError(f"{path}: no statistics file has this name")
    table, metadata = decode_checked(read_bounded(path), schema=SCHEMA, file=str(path))
    for field, expected in _metadata(run, about).items():
        if metadata.get(field) != expected:
            raise FormatError(f"{path}: field {field}: {metadata.get(field)!r} where {expected!r} belongs")
    for column, allowed in (("exponents", _EXPONENTS), ("sketch", _SKETCHES)):
        for length in pc.unique(pc.list_value_length(table[column])).to_pylist():
            if length not in allowed:
                raise FormatError(f"{path}: column {column}: a list of {length} where one of {allowed} belongs")
    return table


def read_merged(paths: HistoryPaths, run: str, step: int, world_size: int) -> pa.Table:
    """Read all parts of a checkpoint and merge them (`merged_statistics`). CorruptError or FormatError when a file
    can't be trusted."""
    folder = paths.statistics_dir(run)
    return merged_statistics(
        [read_statistics(folder / StatisticsFile(step, rank, world_size).name, run=run) for rank in range(world_size)]
    )


def merged_statistics(parts: Sequence[pa.Table]) -> pa.Table:
    """Merge the statistics of fragments into those of logical tensors, one row for each.

    `parts` are the tables of all ranks, in order. For rank-local tensors, the rows of rank 0 are taken. Counts are
    exact; sums are exact up to float64 rounding. FormatError when the sketches of one tensor differ in length, or a
    sum of counts exceeds an int64.
    """
    local = pc.field("placement") == "rank_local"
    rows = pa.concat_tables([parts[0], *(part.filter(~local) for part in parts[1:])])
    key = pc.binary_join_element_wise(rows["kind"], rows["name"], "/")
    counts = key.value_counts()
    shared = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    several = pc.is_in(key, shared)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows.filter(several).to_pylist():
        groups.setdefault((row["kind"], row["name"]), []).append(row)
    try:
        merged = pa.Table.from_pylist([_sum(members) for members in groups.values()], schema=SCHEMA)
    except OverflowError as error:
        raise FormatError(f"statistics: the counts of the fragments of a tensor add up to no count: {error}") from error
    return pa.concat_tables([rows.filter(pc.invert(several)), merged])


def _sum(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    members = sorted(members, key=lambda row: row["start"])
    buckets = sorted({len(row["sketch"]) for row in members})
    if len(buckets) > 1:
        tensor = f"{members[0]['kind']}/{members[0]['name']}"
        raise FormatError(f"statistics of {tensor}: its fragments have sketches of {buckets} buckets, must be equal")
    lows = [row["min"] for row in members if row["min"] is not None]
    highs = [row["max"] for row in members if row["max"] is not None]
    sums = ("numel", "nan", "inf", "zeros", "sum", "sum_of_squares")
    return {
        **members[0],
        **{name: sum(row[name] for row in members) for name in sums},
        "min": min(lows, default=None),
        "max": max(highs, default=None),
        "exponents": np.sum([row["exponents"] for row in members], axis=0, dtype=np.int64).tolist(),
        "sketch": np.sum([row["sketch"] for row in members], axis=0, dtype=np.float64).tolist(),
    }


def _metadata(run: str, about: StatisticsFile) -> Mapping[str, str]:
    return {
        "dshistory.statistics": VERSION,
        "run": run,
        "step": str(about.step),
        "rank": str(about.rank),
        "world_size": str(about.world_size),
        "sketch_seed": SKETCH_SEED,
    }
