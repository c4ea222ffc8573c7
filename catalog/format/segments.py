"""Immutable Parquet segments to which the writers of a run add rows: those of its journal, and its fingerprints.

A writer publishes rows in batches. A batch is durable once its segment `<writer>-<number>.parquet` is published, and a
segment never changes.

So that a long run does not leave a file for each batch, a writer merges its own segments: sixteen into one, sixteen of
those into one again, and all that there are at `close`. A merged segment `<writer>-<first>-to-<last>.parquet` replaces
those whose numbers it spans. It is durable before the first of them is removed, and it says how many rows came from
each. A reader therefore finds every row exactly once, whichever of the files it meets: `current_segments` leaves out
what another file replaces, and the index takes from a merged segment the rows of those that it does not have. A file
that is gone when the reader comes to it has been replaced, as the next of the `listings` says.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from catalog.disk.checked_parquet import decode_checked, encode_checked, read_bounded
from catalog.disk.durable import publish_bytes
from catalog.disk.regular_file import is_real_folder
from catalog.errors import FormatError

__all__ = [
    "Segment",
    "SegmentKind",
    "SegmentWriter",
    "current_segments",
    "is_segment",
    "listings",
    "parse_segment",
    "read_segment_rows",
    "segments",
]

_SEGMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,99}?)-([0-9]{8})(?:-to-([0-9]{8}))?\.parquet")

_MERGED_AT_ONCE = 16
_MAX_MERGED_BYTES = 16 << 20
"""A merged segment has at most so many bytes of rows in memory, since it is read again when it is merged itself."""
_MAX_LISTINGS = 20
_MAX_SPAN = 1_000_000
"""A merged segment has fewer numbers than this, so that a hostile one can't make their list long."""


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKind:
    """Describes the rows of segments: the fact that names them with its version, and their columns."""

    fact: str
    version: str
    schema: pa.Schema


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


@dataclass(slots=True)
class _Published:
    """A segment that this writer has published: the bytes of its rows in memory, and how often they were merged; None
    when they are not merged any more before the end."""

    segment: Segment
    nbytes: int
    merges: int | None = 0


class SegmentWriter:
    """One writer of the segments in a folder. Its calls must follow each other; they may come from any thread."""

    def __init__(self, folder: Path, kind: SegmentKind, *, run: str, writer: str) -> None:
        self._folder = folder
        self._kind = kind
        self._run = run
        self._writer = writer
        self._unsure: list[pa.Table] = []
        self._published: list[_Published] = []
        self._sequence = _next_sequence(folder, writer)

    @property
    def unpublished(self) -> int:
        """The number of batches that failed to be published, and are part of the next attempt."""
        return len(self._unsure)

    def publish(self, rows: pa.Table) -> None:
        """Publish a batch of rows as one segment, and merge segments when there are many. When this raises, the rows
        are part of the next attempt."""
        if not rows.num_rows and not self._unsure:
            return
        # After an error nobody knows whether the name is on disk already, so it is never used for other rows. The next
        # attempt has a name that replaces it.
        batches = [*self._unsure, rows]
        segment = Segment(self._writer, self._sequence - len(self._unsure), self._sequence)
        self._sequence += 1
        failed, self._unsure = self._unsure, batches
        table = pa.concat_tables(batches)
        self._write(segment, table, [batch.num_rows for batch in batches])
        self._unsure = []
        for last in range(segment.first, segment.first + len(failed)):
            self._remove(Segment(self._writer, segment.first, last))
        self._published.append(_Published(segment, table.nbytes))
        self._merge_many()

    def close(self) -> None:
        """Merge the segments that this object has published into as few as their size allows. When that fails, they
        stay as they are, and no row is lost."""
        with contextlib.suppress(OSError, FormatError):
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
        parts = [read_segment_rows(self._folder / old.segment.name, self._kind, run=self._run) for old in group]
        table = pa.concat_tables([part for part, _ in parts])
        segment = Segment(self._writer, group[0].segment.first, group[-1].segment.last)
        self._write(segment, table, [count for _, counts in parts for count in counts])
        at = self._published.index(group[0])
        merged = _Published(segment, table.nbytes, (group[0].merges or 0) + 1)
        self._published[at : at + len(group)] = [merged]
        for old in group:
            self._remove(old.segment)

    def _write(self, segment: Segment, table: pa.Table, counts: Sequence[int]) -> None:
        facts = {self._kind.fact: self._kind.version, "run": self._run}
        if segment.first != segment.last:
            facts["segments"] = json.dumps([[len(list(equal)), count] for count, equal in groupby(counts)])
        publish_bytes(encode_checked(table, metadata=facts), self._folder / segment.name)

    def _remove(self, segment: Segment) -> None:
        # A segment that stays is ignored by readers: another one replaces it.
        with contextlib.suppress(OSError):
            (self._folder / segment.name).unlink()


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


def _next_sequence(folder: Path, writer: str) -> int:
    """Return the number of the writer's next segment. A writer that is opened again continues where it stopped, so that
    it never replaces a published segment."""
    found = (parse_segment(path.name) for path in segments(folder))
    return max((segment.last + 1 for segment in found if segment and segment.writer == writer), default=0)


def segments(folder: Path) -> Iterator[Path]:
    """Yield the published segments in a folder, by name; also those that another one replaces."""
    with contextlib.suppress(FileNotFoundError):
        if is_real_folder(folder):
            yield from sorted(path for path in folder.iterdir() if is_segment(path.name))


def listings(folder: Path) -> Iterator[list[str]]:
    """Yield the names of the published segments in a folder, each time as it is listed anew, twenty times at most.

    A writer merges its segments at any time. Whoever finds one gone (FileNotFoundError) goes on with the next listing,
    where another segment has its rows. So does whoever misses one before it is called lost: a folder that changes
    while it is listed may be listed with neither.
    """
    for _ in range(_MAX_LISTINGS):
        yield [path.name for path in segments(folder)]


def is_segment(name: str) -> bool:
    """Return whether a published segment can have this name."""
    return parse_segment(name) is not None


def read_segment_rows(path: Path, kind: SegmentKind, *, run: str) -> tuple[pa.Table, list[int]]:
    """Read one segment as a table with the columns of its kind, and how many of its rows were published under each of
    its numbers, in order. CorruptError when it is damaged, FormatError when it is of another kind or version, or
    belongs to another run."""
    table, metadata = decode_checked(read_bounded(path), schema=kind.schema, file=str(path))
    for field, expected in ((kind.fact, kind.version), ("run", run)):
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
