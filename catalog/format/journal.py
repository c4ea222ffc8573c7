"""The journal of a run: metrics, events and tags in immutable Parquet segments `<writer>-<sequence>.parquet`.

A row is one metric value, one event or one tag. Rows gather in memory until `flush`, which the session calls every few
seconds and at each commit, publishes them as one segment. A row is durable once its segment is published, and a segment
never changes.
"""

import datetime
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from catalog.disk.checked_parquet import decode_checked, encode_checked, read_bounded
from catalog.disk.durable import publish_bytes
from catalog.errors import FormatError

__all__ = ["JOURNAL_SCHEMA", "NO_RANK", "Journal", "is_segment", "read_segment", "segments"]

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
NO_RANK = -1
"""The rank in rows that no rank of the run wrote."""
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}-[0-9]{8}\.parquet")


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
        self._folder = folder
        self._run = run
        self._writer = writer
        self._rank = rank
        self._rows: list[_Row] = []
        self._sequence = _next_sequence(folder, writer)
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
                rows = list(self._rows)
            if not rows:
                return
            name = f"{self._writer}-{self._sequence:08d}.parquet"
            publish_bytes(_encode(rows, run=self._run), self._folder / name)
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
        with self._lock:
            # Strictly later than the row before: of two values of one step, the later one counts.
            self._last = max(datetime.datetime.now(datetime.UTC), self._last + datetime.timedelta(microseconds=1))
            self._rows.append(_Row(kind, step, self._rank, name, value, detail, self._last))


def _encode(rows: list[_Row], *, run: str) -> bytes:
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in JOURNAL_SCHEMA}
    return encode_checked(
        pa.table(columns, schema=JOURNAL_SCHEMA), metadata={"dshistory.journal": _VERSION, "run": run}
    )


def _next_sequence(folder: Path, writer: str) -> int:
    """Return the number of the writer's next segment. A writer that is opened again continues where it stopped, so that
    it never replaces a published segment."""
    numbers = [path.stem.rpartition("-") for path in segments(folder)]
    return max((int(number) + 1 for name, _, number in numbers if name == writer), default=0)


def segments(folder: Path) -> Iterator[Path]:
    """Yield the published segments of a journal, sorted by name; none when the folder does not exist."""
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if is_segment(path.name))


def is_segment(name: str) -> bool:
    """Return whether a file with this name in a journal's folder is a published segment."""
    return _SEGMENT.fullmatch(name) is not None


def read_segment(path: Path, *, run: str) -> pa.Table:
    """Read one segment as a table with the columns of JOURNAL_SCHEMA. CorruptError when it is damaged, FormatError when
    it has another version or belongs to another run."""
    table, metadata = decode_checked(read_bounded(path), schema=JOURNAL_SCHEMA, file=str(path))
    for field, expected in (("dshistory.journal", _VERSION), ("run", run)):
        if metadata.get(field) != expected:
            raise FormatError(f"{path}: field {field}: {metadata.get(field)!r} where {expected!r} belongs")
    return table
