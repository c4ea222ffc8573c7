"""Computes the statistics of a committed checkpoint from its data files, one rank's part at a time.

extents of the part -> read in batches, verified -> the native kernel -> rows of `statistics_file.SCHEMA`
                    -> extents whose bytes are those of an earlier, analyzed checkpoint: its row, without reading
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import native
from catalog.data_files.pieces import Piece, piece_of
from catalog.data_files.stored_bytes import Buffer, ReadBuffer, bytes_in_files, mismatches, place_batches
from catalog.errors import CorruptError, HistoryError
from catalog.format.dtypes import DTYPES
from catalog.format.extents import extent_records
from catalog.format.marker import read_marker
from catalog.format.statistics_file import SCHEMA, StatisticsFile, publish_statistics, read_statistics
from catalog.paths import HistoryPaths, parse_data_file
from catalog.read.checkpoint import read_part
from catalog.read.provider_tensors import state_only
from catalog.records import CheckpointRef, Extent

__all__ = ["BUCKETS", "analyze_part", "buckets_of", "missing_parts", "sketch_key"]

BATCH_BYTES = 32 << 20
_MOST_ROWS = 256
BUCKETS = 256
_LEAST_BUCKETS = 16

_UNSKETCHED_KINDS = frozenset({"buffer"})
"""Kinds whose tensors get no sketch: constants for the most part, and masks that are not finite."""


def missing_parts(paths: HistoryPaths, ref: CheckpointRef) -> list[StatisticsFile]:
    """Return the parts of a committed checkpoint that have no statistics yet. NotFoundError when it is not
    committed."""
    world_size = read_marker(paths, ref.run, ref.step).world_size
    parts = [StatisticsFile(ref.step, rank, world_size) for rank in range(world_size)]
    folder = paths.statistics_dir(ref.run)
    return [part for part in parts if not (folder / part.name).exists()]


def analyze_part(
    paths: HistoryPaths,
    run: str,
    about: StatisticsFile,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
    stopped: Callable[[], bool] = lambda: False,
    may_publish: Callable[[], bool] = lambda: True,
) -> bool:
    """Compute and publish the statistics of one rank's part of a committed checkpoint.

    Return False, with nothing published, when `stopped` returns True, which is called before each batch, or
    `may_publish` False, which is called once, when all is computed. `progress` is called with the bytes of each batch.
    The buffer takes little more than BATCH_BYTES. CorruptError when the bytes of an extent differ from its checksum; an
    extent larger than BATCH_BYTES is read in pieces and is not verified, since its pieces have no checksums of their
    own.
    """
    marker = read_marker(paths, run, about.step)
    manifest = read_part(paths, marker, marker.parts[about.rank])
    state = extent_records(state_only(manifest.table))
    earlier = _EarlierStatistics(paths)
    rows = _Rows()
    to_read = []
    for extent in state:
        row = earlier.row(extent) if extent.file != manifest.file else None
        if row is None:
            to_read.append(extent)
        else:
            rows.add([row])
    buffer = ReadBuffer()
    for batch in place_batches(to_read, most_bytes=BATCH_BYTES):
        if stopped():
            return False
        rows.add(_computed(paths.root, batch, buffer))
        progress(bytes_in_files(batch))
    if not may_publish():
        return False
    publish_statistics(paths, run, about, rows.table())
    # The pool keeps what a thread has freed for that thread, which comes back for it after the next checkpoint only.
    pa.default_memory_pool().release_unused()
    return True


def sketch_key(kind: str, name: str) -> int:
    """Return the key of a tensor's sketch, from which its hashes are derived: the first 8 bytes, little endian, of the
    XXH3-128 of `kind/name`."""
    return int.from_bytes(native.checksum(f"{kind}/{name}".encode())[:8], "little")


def buckets_of(kind: str, numel: int) -> int:
    """Return the number of buckets in the sketch of a logical tensor with `numel` elements: 256, fewer for a shorter
    tensor, and 0 when it gets no sketch."""
    if kind in _UNSKETCHED_KINDS or numel < _LEAST_BUCKETS:
        return 0
    return min(BUCKETS, 1 << (numel.bit_length() - 1))


class _Rows:
    """Rows of statistics, as columns but for the latest few: as Python objects each takes many times the bytes."""

    def __init__(self) -> None:
        self._tables = [SCHEMA.empty_table()]
        self._rows: list[dict[str, Any]] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            self._rows.append(row)
            if len(self._rows) == _MOST_ROWS:
                self._convert()

    def table(self) -> pa.Table:
        """Return all rows in the order in which they came."""
        self._convert()
        return pa.concat_tables(self._tables)

    def _convert(self) -> None:
        self._tables.append(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []


class _EarlierStatistics:
    """The statistics of earlier checkpoints, for extents that refer to bytes in their files."""

    def __init__(self, paths: HistoryPaths) -> None:
        self._paths = paths

    def row(self, extent: Extent) -> dict[str, Any] | None:
        rows = self._rows(extent.file)
        found = rows.get((extent.kind, extent.name, extent.start, extent.numel))
        return found if found is not None and found["checksum"] == extent.checksum else None

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as one analysis
    def _rows(self, file: str) -> Mapping[tuple[str, str, int, int], dict[str, Any]]:
        parsed = parse_data_file(file)
        if parsed is None:
            return {}
        run, step, rank = parsed
        try:
            world_size = read_marker(self._paths, run, step).world_size
            path = self._paths.statistics_dir(run) / StatisticsFile(step, rank, world_size).name
            table = read_statistics(path, run=run)
        except (OSError, HistoryError):
            # Statistics that can't be read count as missing: then the bytes are read.
            return {}
        return {(row["kind"], row["name"], row["start"], row["numel"]): row for row in table.to_pylist()}


def _computed(root: Path, batch: list[Extent], buffer: ReadBuffer) -> Iterator[dict[str, Any]]:
    if len(batch) == 1 and batch[0].nbytes > BATCH_BYTES:
        yield _in_pieces(root, batch[0], buffer)
        return
    pieces = _read(root, [piece_of(extent) for extent in batch], buffer)
    found = [_statistics(extent, data, 0) for extent, data in zip(batch, pieces, strict=True)]
    for extent, _ in mismatches(batch, b"".join(one.checksum for one in found)):
        raise CorruptError(
            f"{root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: the bytes are not "
            "those that were written: the file is damaged"
        )
    for extent, one in zip(batch, found, strict=True):
        yield _row(extent, [one])


def _in_pieces(root: Path, extent: Extent, buffer: ReadBuffer) -> dict[str, Any]:
    itemsize = DTYPES[extent.dtype]
    found = []
    for at in range(0, extent.nbytes, BATCH_BYTES):
        nbytes = min(BATCH_BYTES, extent.nbytes - at)
        (data,) = _read(root, [piece_of(extent, skip_bytes=at, nbytes=nbytes)], buffer)
        found.append(_statistics(extent, data, at // itemsize))
    return _row(extent, found)


def _read(root: Path, pieces: Sequence[Piece], buffer: ReadBuffer) -> list[Buffer]:
    """Read pieces without their checksums, which the kernel computes together with the statistics."""
    try:
        return buffer.read(root, pieces, checksums=False)[0]
    except OSError as error:
        raise CorruptError(f"{error.filename}: {error.strerror}: the file is damaged, truncated or missing") from error


def _statistics(extent: Extent, data: Buffer, skipped: int) -> native.Statistics:
    return native.statistics(
        data,
        extent.dtype,
        start=extent.start + skipped,
        key=sketch_key(extent.kind, extent.name),
        buckets=buckets_of(extent.kind, prod(extent.shape)),
    )


def _row(extent: Extent, found: list[native.Statistics]) -> dict[str, Any]:
    return {
        "name": extent.name,
        "kind": extent.kind,
        "placement": extent.placement,
        "start": extent.start,
        "numel": extent.numel,
        "checksum": extent.checksum,
        "nan": sum(part.nan for part in found),
        "inf": sum(part.inf for part in found),
        "zeros": sum(part.zeros for part in found),
        "min": min((part.min for part in found if part.min is not None), default=None),
        "max": max((part.max for part in found if part.max is not None), default=None),
        "sum": sum(part.sum for part in found),
        "sum_of_squares": sum(part.sum_of_squares for part in found),
        "exponents": np.sum([part.exponents for part in found], axis=0, dtype=np.int64).tolist(),
        "sketch": np.sum([part.sketch for part in found], axis=0, dtype=np.float64).tolist(),
    }
