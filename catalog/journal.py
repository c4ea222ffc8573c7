"""The journal of a run: metrics of every step, events and tags, as immutable Parquet segments `<writer>-<seq>.parquet`.

A row is one metric value, one event or one tag. Rows gather in memory and go out with `flush`, which the session calls
every few seconds and at each commit; a row is durable once its segment is published. A segment is never changed.
"""

import datetime
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from catalog.errors import CorruptError, FormatError
from catalog.publish import publish, write_new

__all__ = ["JOURNAL_SCHEMA", "Journal", "read_segment", "segments"]

JOURNAL_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("step", pa.int64(), nullable=True),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=True),
        pa.field("detail", pa.string(), nullable=True),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
_VERSION = "1"
_MAX_SEGMENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Row:
    kind: Literal["metric", "event", "tag"]
    step: int | None
    rank: int
    name: str
    value: float | None
    detail: str | None
    time: datetime.datetime


class Journal:
    """The writing end, one per rank of a run. Thread-safe; nothing is written before `flush`."""

    def __init__(self, folder: Path, *, writer: str, rank: int) -> None:
        self._folder = folder
        self._writer = writer
        self._rank = rank
        self._rows: list[_Row] = []
        self._sequence = 0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def metric(self, step: int, name: str, value: float) -> None:
        """The value of a metric at a step; NaN and infinities are kept as they are."""
        self._append("metric", step, name, float(value), None)

    def event(self, name: str, step: int | None, **detail: Any) -> None:
        """Something that happened: `detail` must be expressible as JSON."""
        self._append("event", step, name, None, json.dumps(detail, sort_keys=True))

    def tag(self, name: str, step: int) -> None:
        """Give a step a name; the newest tag of a name counts."""
        self._append("tag", step, name, None, None)

    def flush(self) -> None:
        """Publish what has gathered as one segment; when that fails, the rows stay for the next attempt."""
        with self._flushing:
            with self._lock:
                rows = list(self._rows)
            if not rows:
                return
            name = f"{self._writer}-{self._sequence:08d}.parquet"
            tmp = self._folder / f".{name}.tmp"
            tmp.unlink(missing_ok=True)
            write_new(tmp, _encode(rows))
            publish(tmp, self._folder / name)
            self._sequence += 1
            with self._lock:
                del self._rows[: len(rows)]

    def _append(
        self,
        kind: Literal["metric", "event", "tag"],
        step: int | None,
        name: str,
        value: float | None,
        detail: str | None,
    ) -> None:
        row = _Row(kind, step, self._rank, name, value, detail, datetime.datetime.now(datetime.UTC))
        with self._lock:
            self._rows.append(row)


def _encode(rows: list[_Row]) -> bytes:
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in JOURNAL_SCHEMA}
    table = pa.table(columns, schema=JOURNAL_SCHEMA.with_metadata({"dshistory.journal": _VERSION}))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def segments(folder: Path) -> Iterator[Path]:
    """The published segments of a run's journal, by name; none when the folder does not exist."""
    if folder.is_dir():
        yield from sorted(
            path for path in folder.iterdir() if path.suffix == ".parquet" and not path.name.startswith(".")
        )


def read_segment(path: Path) -> pa.Table:
    """One segment as a table of JOURNAL_SCHEMA. CorruptError when unreadable, FormatError when of another version."""
    size = path.stat().st_size
    if size > _MAX_SEGMENT_BYTES:
        raise FormatError(f"{path}: {size} bytes where at most {_MAX_SEGMENT_BYTES} are allowed")
    try:
        table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read()
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"{path}: not readable as a journal segment: {error}") from error
    version = (table.schema.metadata or {}).get(b"dshistory.journal", b"").decode(errors="replace")
    if version != _VERSION or not table.schema.remove_metadata().equals(JOURNAL_SCHEMA):
        raise FormatError(f"{path}: not a journal segment of version {_VERSION}")
    return table.replace_schema_metadata(None)
