"""The journal of a run: metrics, events and tags in immutable Parquet segments.

A row is one metric value, one event or one tag. Rows gather in memory until `flush`, which the session calls at each
commit and every minute, publishes them as one segment `<writer>-<number>.parquet`. A row is durable once its segment is
published, and a segment never changes.

So that a long run does not leave a file for each flush, a writer merges its own segments: sixteen into one, sixteen of
those into one again, and all that there are at `close`. A merged segment `<writer>-<first>-to-<last>.parquet` replaces
those whose numbers it spans. It is durable before the first of them is removed, and it says how many rows came from
each. A reader therefore finds every row exactly once, whichever of the files it meets: `current_segments` leaves out
what another file replaces, and the index takes from a merged segment the rows of those that it does not have.
"""

import contextlib
import datetime
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from catalog.disk.checked_parquet import decode_checked, encode_checked, read_bounded
from catalog.disk.durable import publish_bytes
from catalog.disk.regular_file import is_real_folder
from catalog.errors import FormatError

__all__ = [
    "JOURNAL_SCHEMA",
    "NO_RANK",
    "Journal",
    "Segment",
    "current_segments",
    "is_segment",
    "parse_segment",
    "read_segment",
    "read_segment_rows",
    "segments",
]

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
_SEGMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,99}?)-([0-9]{8})(?:-to-([0-9]{8}))?\.parquet")

_MERGED_AT_ONCE = 16
_MAX_MERGED_BYTES = 16 << 20
"""A merged segment has at most so many bytes of rows in memory, since it is read again when it is merged itself."""
_MAX_SPAN = 1_000_000
"""A merged segment has fewer numbers than this, so that a hostile one can't make their list long."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The numbers that a segment's rows were published under, `first` to `last`: more than one in a merged segment."""

    writer: str
    first: int
    last: int

    @property
    def name(self) -> str:
        """The name of the segment's file."""
        span = f"{self.first:08d}" if self.first == self.last else f"{self.first:08d}-to-{self.last:08d}"
        return f"{self.writer}-{span}.parquet"

    def replaces(self, other: "Segment") -> bool:
        """Return whether this segment has all rows of the other one, which is not itself."""
        return self != other and self.writer == other.writer and self.first <= other.first and other.last <= self.last


def parse_segment(name: str) -> Segment | None:
    """Return the segment that a file with this name is, or None when no segment has such a name."""
    match = _SEGMENT.fullmatch(name)
    if match is None:
        return None
    first = int(match[2])
    if match[3] is None:
        return Segment(match[1], first, first)
    last = int(match[3])
    return Segment(match[1], first, last) if first < last < first + _MAX_SPAN else None


def current_segments(names: Iterable[str]) -> list[Segment]:
    """Return the segments among the names of a folder's files, in order, without those that another one replaces."""
    found = filter(None, map(parse_segment, names))
    current: list[Segment] = []
    for segment in sorted(found, key=lambda segment: (segment.writer, segment.first, -segment.last)):
        if not current or not current[-1].replaces(segment):
            current.append(segment)
    return current


@dataclass(frozen=True, slots=True)
class _Row:
    kind: Literal["metric", "event", "tag"]
    step: int | None
    rank: int
    name: str
    value: float | None
    detail: str | None
    time: datetime.datetime


@dataclass(slots=True)
class _Published:
    """A segment that this writer has published: the bytes of its rows in memory, and how often they were merged; None
    when they are not merged any more before the end."""

    segment: Segment
    nbytes: int
    merges: int | None = 0


class Journal:
    """The writer of a journal, one per rank of a run. Thread-safe; nothing reaches the disk before `flush`."""

    def __init__(self, folder: Path, *, run: str, writer: str, rank: int) -> None:
        self._folder = folder
        self._run = run
        self._writer = writer
        self._rank = rank
        self._rows: list[_Row] = []
        self._unsure: list[list[_Row]] = []
        self._published: list[_Published] = []
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
                rows, self._rows = self._rows, []
            if not rows and not self._unsure:
                return
            # After an error nobody knows whether the name is on disk already, so it is never used for other rows. The
            # next attempt has a name that replaces it.
            batches = [*self._unsure, rows]
            segment = Segment(self._writer, self._sequence - len(self._unsure), self._sequence)
            self._sequence += 1
            failed, self._unsure = self._unsure, batches
            table = _table([row for batch in batches for row in batch])
            self._publish(segment, table, [len(batch) for batch in batches])
            self._unsure = []
            for last in range(segment.first, segment.first + len(failed)):
                self._remove(Segment(self._writer, segment.first, last))
            self._published.append(_Published(segment, table.nbytes))
            self._merge_many()

    def close(self) -> None:
        """Flush, and merge the segments that this object has published into as few as their size allows. When the
        merging fails, they stay as they are, and no row is lost."""
        self.flush()
        with self._flushing, contextlib.suppress(OSError, FormatError):
            # The list grows shorter by merging, so the groups are made first.
            for group in _groups(self._published):
                self._merge(group)

    def _merge_many(self) -> None:
        """Merge the last segments when there are many that were merged equally often."""
        while self._published and self._published[-1].merges is not None:
            merges = self._published[-1].merges
            group = self._published[-_MERGED_AT_ONCE:]
            if len(group) < _MERGED_AT_ONCE or any(published.merges != merges for published in group):
                return
            try:
                if sum(published.nbytes for published in group) > _MAX_MERGED_BYTES:
                    raise FormatError("the segments are too large to be merged")
                self._merge(group)
            except (OSError, FormatError):
                # No row is lost. The next sixteen are merged by themselves, and `close` tries again.
                for published in group:
                    published.merges = None

    def _merge(self, group: Sequence[_Published]) -> None:
        """Publish one segment that replaces several, and then remove those."""
        if len(group) < 2:
            return
        parts = [read_segment_rows(self._folder / old.segment.name, run=self._run) for old in group]
        table = pa.concat_tables([part for part, _ in parts])
        segment = Segment(self._writer, group[0].segment.first, group[-1].segment.last)
        self._publish(segment, table, [count for _, counts in parts for count in counts])
        at = self._published.index(group[0])
        merged = _Published(segment, table.nbytes, (group[0].merges or 0) + 1)
        self._published[at : at + len(group)] = [merged]
        for old in group:
            self._remove(old.segment)

    def _publish(self, segment: Segment, table: pa.Table, counts: Sequence[int]) -> None:
        facts = {"dshistory.journal": _VERSION, "run": self._run}
        if segment.first != segment.last:
            facts["segments"] = json.dumps([[len(list(equal)), count] for count, equal in groupby(counts)])
        publish_bytes(encode_checked(table, metadata=facts), self._folder / segment.name)

    def _remove(self, segment: Segment) -> None:
        # A segment that stays is ignored by readers: another one replaces it.
        with contextlib.suppress(OSError):
            (self._folder / segment.name).unlink()

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


def _groups(published: Sequence[_Published]) -> list[list[_Published]]:
    """Divide the segments into groups of neighbours, each as large as a merged segment may be."""
    groups: list[list[_Published]] = []
    nbytes = 0
    for one in published:
        if not groups or nbytes + one.nbytes > _MAX_MERGED_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(one)
        nbytes += one.nbytes
    return groups


def _table(rows: list[_Row]) -> pa.Table:
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in JOURNAL_SCHEMA}
    return pa.table(columns, schema=JOURNAL_SCHEMA)


def _next_sequence(folder: Path, writer: str) -> int:
    """Return the number of the writer's next segment. A writer that is opened again continues where it stopped, so that
    it never replaces a published segment."""
    found = (parse_segment(path.name) for path in segments(folder))
    return max((segment.last + 1 for segment in found if segment and segment.writer == writer), default=0)


def segments(folder: Path) -> Iterator[Path]:
    """Yield the published segments in a run's journal folder, by name; also those that another one replaces."""
    if is_real_folder(folder):
        yield from sorted(path for path in folder.iterdir() if is_segment(path.name))


def is_segment(name: str) -> bool:
    """Return whether a published segment can have this name."""
    return parse_segment(name) is not None


def read_segment(path: Path, *, run: str) -> pa.Table:
    """Read one segment as a table with the columns of JOURNAL_SCHEMA. CorruptError when it is damaged, FormatError when
    it has another version or belongs to another run."""
    return read_segment_rows(path, run=run)[0]


def read_segment_rows(path: Path, *, run: str) -> tuple[pa.Table, list[int]]:
    """Read one segment, and how many of its rows were published under each of its numbers, in order. The errors are
    those of `read_segment`."""
    table, metadata = decode_checked(read_bounded(path), schema=JOURNAL_SCHEMA, file=str(path))
    for field, expected in (("dshistory.journal", _VERSION), ("run", run)):
        if metadata.get(field) != expected:
            raise FormatError(f"{path}: field {field}: {metadata.get(field)!r} where {expected!r} belongs")
    segment = parse_segment(path.name)
    if segment is None or segment.first == segment.last:
        return table, [table.num_rows]
    counts = _counts(metadata.get("segments", ""), limit=segment.last - segment.first + 1)
    if len(counts) != segment.last - segment.first + 1 or sum(counts) != table.num_rows:
        raise FormatError(
            f"{path}: field segments: {metadata.get('segments', '')[:200]!r} does not divide {table.num_rows} rows "
            f"among the numbers {segment.first} to {segment.last}"
        )
    return table, counts


def _counts(text: str, *, limit: int) -> list[int]:
    """Return the rows of each number, from pairs of how many numbers and how many rows each; an empty list when that is
    not what the text says, or there are more than `limit`."""
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError):
        return []
    counts: list[int] = []
    for pair in pairs if isinstance(pairs, list) else ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(value) is int and value >= 0 for value in pair):
            return []
        if pair[0] + len(counts) > limit:
            return []
        counts += [pair[1]] * pair[0]
    return counts
