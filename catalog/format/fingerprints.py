"""Fingerprints: 8 bytes for each tensor of a rank after each step, captured or not, in segments of their own.

A row holds the digests of one step, and the id of the description of its tensors: their names and how much of each was
looked at. The description itself stands in the first row of each batch that needs it, so a segment is read by itself.
Equal bytes have equal digests at the same step, in every run and on every rank, where they were looked at in the same
way. What is not published when a process ends is lost; nothing depends on it.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.errors import FormatError
from catalog.format.segments import SegmentKind, SegmentWriter, read_segment_rows
from catalog.paths import HistoryPaths, parse_step_dir
from catalog.records import CHECKSUM_BYTES
from native import checksum

__all__ = [
    "DIGEST_BYTES",
    "FINGERPRINTS",
    "Coverage",
    "FingerprintWriter",
    "StepFingerprint",
    "TensorTable",
    "TracedTensor",
    "read_fingerprints",
    "seed_of",
]

Coverage = Literal["whole", "sampled", "hash", "device", "device_hash", "none"]
"""How much of a tensor its digest is of: all bytes ("whole", "hash", "device_hash"), a sample ("sampled", "device"), or
nothing. Digests of different coverage are computed differently, and are not comparable."""

DIGEST_BYTES = 8

FINGERPRINTS = SegmentKind(
    "dshistory.fingerprints",
    "1",
    pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("table", pa.binary(CHECKSUM_BYTES), nullable=False),
            pa.field("tensors", pa.string(), nullable=True),
            pa.field("digests", pa.binary(), nullable=False),
        ]
    ),
)

_MAX_DIMENSIONS = 64
_MAX_DESCRIPTION_BYTES = 64 << 20
"""All descriptions in one segment together have at most so many bytes."""


def seed_of(step: int) -> int:
    """Return the seed of all digests of a step."""
    return step


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One tensor, or fragment of one, as a rank has it: the elements `[start, start + numel)` of the logical tensor."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    placement: str
    coverage: Coverage

    @property
    def label(self) -> str:
        """Its kind and name, as messages show them, and which part of it this is."""
        whole = self.start == 0 and self.numel == math.prod(self.shape)
        part = "" if whole else f"[{self.start}:{self.start + self.numel}]"
        return f"{self.kind} {self.name!r}{part}"


@dataclass(frozen=True, eq=False)
class TensorTable:
    """The tensors of a fingerprint, in the order of its digests."""

    tensors: tuple[TracedTensor, ...]

    @cached_property
    def text(self) -> str:
        """The description as it is stored. FormatError when it is larger than a reader takes."""
        rows = [
            [one.kind, one.name, one.dtype, one.shape, one.start, one.numel, one.placement, one.coverage]
            for one in self.tensors
        ]
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        if len(text.encode()) > _MAX_DESCRIPTION_BYTES:
            raise FormatError(f"{len(rows)} tensors are too many for a fingerprint")
        return text

    @cached_property
    def id(self) -> bytes:
        """The checksum of the description."""
        return checksum(self.text.encode())


@dataclass(frozen=True, slots=True, eq=False)
class StepFingerprint:
    """The digests of one rank's tensors after a step: `digests`, uint64 [tensors], in the order of `table`."""

    step: int
    rank: int
    table: TensorTable
    digests: npt.NDArray[np.uint64]


class FingerprintWriter:
    """The writer of the fingerprints of one rank. Its calls must follow each other; they may come from any thread."""

    def __init__(self, paths: HistoryPaths, *, run: str, rank: int) -> None:
        self._rank = rank
        folder = paths.fingerprints_dir(run)
        self._segments = SegmentWriter(folder, FINGERPRINTS, run=run, writer=f"rank-{rank:05d}")

    def publish(self, rows: Sequence[tuple[int, TensorTable, bytes]]) -> None:
        """Publish steps with their tensors and digests as one segment; durable when this returns. When it raises, they
        are part of the next attempt."""
        described: set[bytes] = set()
        found = []
        for step, table, digests in rows:
            is_new = table.id not in described
            described.add(table.id)
            found.append((step, self._rank, table.id, table.text if is_new else None, digests))
        columns = zip(*found, strict=True) if found else ([] for _ in FINGERPRINTS.schema)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, FINGERPRINTS.schema, strict=True)]
        self._segments.publish(pa.Table.from_arrays(arrays, schema=FINGERPRINTS.schema))

    def close(self) -> None:
        """Merge what this object has published into as few segments as their size allows."""
        self._segments.close()


def read_fingerprints(path: Path, *, run: str) -> Iterator[StepFingerprint]:
    """Yield the rows of one segment. CorruptError when it is damaged, FormatError when it has another version, belongs
    to another run, or contradicts itself."""
    rows, _ = read_segment_rows(path, FINGERPRINTS, run=run)
    tables: dict[bytes, TensorTable] = {}
    described = 0
    columns = (rows[name].to_pylist() for name in FINGERPRINTS.schema.names)
    for row, (step, rank, key, text, digests) in enumerate(zip(*columns, strict=True)):
        where = f"{path}: row {row}"
        table = tables.get(key)
        if table is None:
            described += len(text or "")
            if described > _MAX_DESCRIPTION_BYTES:
                raise FormatError(f"{where}: column 'tensors' has more than {_MAX_DESCRIPTION_BYTES} bytes so far")
            table = tables[key] = _parsed(text, key, where=where)
        if len(digests) != DIGEST_BYTES * len(table.tensors):
            raise FormatError(f"{where}: column 'digests' has {len(digests)} bytes for {len(table.tensors)} tensors")
        if step < 0 or parse_step_dir(f"{step:012d}") is None or rank < 0:
            raise FormatError(f"{where}: there is no step {step} of rank {rank}")
        yield StepFingerprint(step, rank, table, np.frombuffer(digests, np.uint64))


def _parsed(text: str | None, key: bytes, *, where: str) -> TensorTable:
    if text is None or checksum(text.encode()) != key:
        raise FormatError(f"{where}: column 'tensors' does not describe the tensors of table {key.hex()}")
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: column 'tensors' is not JSON") from error
    if not isinstance(rows, list):
        raise FormatError(f"{where}: column 'tensors' is no list")
    table = TensorTable(tuple(_tensor(row, where=where) for row in rows))
    vars(table).update(text=text, id=key)
    return table


def _tensor(row: Any, *, where: str) -> TracedTensor:
    if isinstance(row, list) and len(row) == 8:
        kind, name, dtype, shape, start, numel, placement, coverage = row
        texts = all(isinstance(one, str) for one in (kind, name, dtype, placement))
        sizes = [*shape, start, numel] if isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS else [None]
        numbers = all(type(size) is int and 0 <= size < 1 << 56 for size in sizes)
        if texts and numbers and coverage in get_args(Coverage):
            return TracedTensor(kind, name, dtype, tuple(shape), start, numel, placement, coverage)
    raise FormatError(f"{where}: column 'tensors': {str(row)[:200]} describes no tensor")
