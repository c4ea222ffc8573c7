"""The journal of a run: metrics, events and tags in segments (`catalog.format.segments`).

A row is one metric value, one event or one tag. Rows gather in memory until `flush`, which the session calls at each
commit and every minute, publishes them as one segment. A row is durable once its segment is published.
"""

import datetime
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from catalog.format.segments import SegmentKind, SegmentWriter, read_segment_rows

__all__ = ["JOURNAL", "NO_RANK", "Journal", "read_segment"]

JOURNAL = SegmentKind(
    "dshistory.journal",
    "1",
    pa.schema(
        [
            pa.field("kind", pa.string(), nullable=False),
            pa.field("step", pa.int64(), nullable=True),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("value", pa.float64(), nullable=True),
            pa.field("detail", pa.string(), nullable=True),
            pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    ),
)
NO_RANK = -1
"""The rank in rows that no rank of the run wrote."""


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
    """The writer of a journal, one per rank of a run. Thread-safe; nothing reaches the disk before `flush`."""

    def __init__(self, folder: Path, *, run: str, writer: str, rank: int) -> None:
        self._rank = rank
        self._rows: list[_Row] = []
        self._segments = SegmentWriter(folder, JOURNAL, run=run, writer=writer)
        self._last = datetime.datetime.fromtimestamp(0, datetime.UTC)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def metric(self, step: int, name: str, value: float) -> None:
        """Record the value of a metric at a step; NaN and infinities are kept as they are."""
        self._append("metric", step, name, float(value), None)

    def event(self, name: str, step: int | None, **detail: Any) -> None:
        """Record an event. TypeError when `detail` can't be expressed as JSON."""
        self._append("event", step, name, None, json.dumps(detail, sort_keys=True))

    def tag(self, name: str, step: int) -> None:
        """Give a step a name; the newest tag with this name counts."""
        self._append("tag", step, name, None, None)

    def flush(self) -> None:
        """Publish the gathered rows as one segment. When this raises, the rows stay for the next attempt."""
        with self._flushing:
            with self._lock:
                rows, self._rows = self._rows, []
            self._segments.publish(_table(rows))

    def close(self) -> None:
        """Flush, and merge the segments that this object has published into as few as their size allows."""
        self.flush()
        with self._flushing:
            self._segments.close()

    def _append(
        self,
        kind: Literal["metric", "event", "tag"],
        step: int | None,
        name: str,
        value: float | None,
        detail: str | None,
    ) -> None:
        with self._lock:
            # Strictly later than the row before: of two values of one step, the later one counts.
            self._last = max(datetime.datetime.now(datetime.UTC), self._last + datetime.timedelta(microseconds=1))
            self._rows.append(_Row(kind, step, self._rank, name, value, detail, self._last))


def _table(rows: list[_Row]) -> pa.Table:
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in JOURNAL.schema}
    return pa.table(columns, schema=JOURNAL.schema)


def read_segment(path: Path, *, run: str) -> pa.Table:
    """Read one segment as a table with the columns of `JOURNAL`. CorruptError when it is damaged, FormatError when it
    has another version or belongs to another run."""
    return read_segment_rows(path, JOURNAL, run=run)[0]
