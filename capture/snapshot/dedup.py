"""Deduplication: state that is unchanged since a committed checkpoint of the run is referred to, not written again.

The prediction is made from the past: a part that had the same checksum in two checkpoints is expected to have it in the
next. Such parts get no place in the planned file. They are hashed while the training goes on, and those that are
different after all (mispredicted) are written behind the planned bytes, from where they are.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import native
from capture.snapshot.data_file import PlacedPiece, piece_of_part
from capture.snapshot.late_bytes import Background, append
from capture.snapshot.parts import Part
from capture.snapshot.plan import Referable
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = ["Deduplicator", "Published", "StoredAt", "UnchangedCheck"]

_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The place of a part's bytes in a committed checkpoint, and their checksum."""

    file: str
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A rank's published part of a checkpoint: the parts that may be referred to, the checksums of all parts in its
    plan, the keys of the mispredicted ones, and the figures of its cost.
    """

    step: int
    file: str
    parts: Referable
    checksums: bytes
    mispredicted: frozenset[str]
    figures: Mapping[str, float]

    def checksum(self, index: int) -> bytes:
        """Return the checksum of one part of the plan."""
        return self.checksums[CHECKSUM_BYTES * index : CHECKSUM_BYTES * (index + 1)]


class Deduplicator:
    """Learns from the parts that a rank publishes which of its state stays unchanged. `committed` says whether a step's
    checkpoint exists: nothing else may be referred to.

    `stored` has the parts that are expected to be unchanged at the next snapshot, by key. The mapping is replaced,
    never changed, so that any thread may take it.
    """

    def __init__(self, committed: Callable[[int], bool]) -> None:
        self.stored: Mapping[str, StoredAt] = {}
        self._committed = committed
        self._waiting: deque[Published] = deque(maxlen=_MAX_WAITING)
        self._last: Published | None = None
        self._unpredictable: set[str] = set()

    def published(self, part: Published) -> None:
        """Learn from a part once its checkpoint is committed, which other ranks may do later."""
        self._forget(part.mispredicted)
        self._waiting.append(part)
        while any(self._committed(waiting.step) for waiting in self._waiting):
            # A step before a committed one that is not committed itself has failed on another rank.
            first = self._waiting.popleft()
            if self._committed(first.step):
                self._learn(first)

    def _forget(self, mispredicted: frozenset[str]) -> None:
        """Never expect these parts again: one that changes now and then would cost a new plan each time."""
        if mispredicted:
            self._unpredictable |= mispredicted
            self.stored = {key: at for key, at in self.stored.items() if key not in mispredicted}

    def _learn(self, now: Published) -> None:
        last, self._last = self._last, now
        if last is None:
            return
        found = {key: at for key, at in _unchanged(last, now).items() if key not in self._unpredictable}
        if found:
            self.stored = {**self.stored, **found}


class UnchangedCheck:
    """Hashes parts that are expected to be unchanged, in a thread, and appends those that are not to `job`'s file;
    their memory must stay until `wait` returns.

    After `wait`, `references` has the manifest rows of the unchanged parts, `mispredicted` the keys of the others, and
    `placed` says where these are.
    """

    def __init__(
        self, parts: Sequence[Part], stored: Mapping[str, StoredAt], job: native.WriteJob, *, align: int
    ) -> None:
        self.references: list[Extent] = []
        self.mispredicted: frozenset[str] = frozenset()
        self.placed: list[PlacedPiece] = []
        self._parts = parts
        self._stored = stored
        self._job = job
        self._align = align
        self._background = Background("dshistory-hash", self._hash) if parts else None

    @property
    def unchanged_bytes(self) -> int:
        """The number of bytes that are referred to."""
        return sum(extent.nbytes for extent in self.references)

    @property
    def is_done(self) -> bool:
        """True once no live byte is read any more."""
        return self._background is None or self._background.is_done

    def wait(self) -> None:
        """Return once no live byte is read any more."""
        if self._background is not None:
            self._background.wait()

    def require(self) -> None:
        """Wait, and raise what failed: OSError (EFAULT) when memory is gone."""
        if self._background is not None:
            self._background.require()

    def _hash(self) -> None:
        digests = native.checksum_memory(
            addresses=np.array([part.address for part in self._parts], dtype=np.uint64),
            nbytes=np.array([part.nbytes for part in self._parts], dtype=np.uint64),
        )
        mispredicted = []
        for i, part in enumerate(self._parts):
            stored = self._stored[part.key]
            if digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)] == stored.checksum:
                self.references.append(_reference(part, stored))
            else:
                mispredicted.append(part)
        if mispredicted:
            mispredicted.sort(key=lambda part: -part.itemsize)
            pieces = [piece_of_part(part) for part in mispredicted]
            chunks = [(part.address, part.nbytes) for part in mispredicted]
            self.placed = append(self._job, pieces, chunks, align=self._align)
            self.mispredicted = frozenset(part.key for part in mispredicted)


def _unchanged(last: Published, now: Published) -> dict[str, StoredAt]:
    parts = now.parts
    if last.parts is parts:
        digest = np.dtype(f"V{CHECKSUM_BYTES}")
        same = np.frombuffer(last.checksums, digest) == np.frombuffer(now.checksums, digest)
        found = [(key, i) for key, i in parts.indices.items() if same[i]]
    else:
        before = last.parts.indices
        found = [
            (key, i)
            for key, i in parts.indices.items()
            if key in before and last.checksum(before[key]) == now.checksum(i)
        ]
    return {key: StoredAt(now.file, parts.offsets[i], now.checksum(i)) for key, i in found}


def _reference(part: Part, stored: StoredAt) -> Extent:
    return Extent(
        name=part.item.name,
        kind=part.item.kind,
        dtype=part.dtype,
        shape=part.item.shape,
        start=part.start,
        numel=part.numel,
        file=stored.file,
        offset=stored.offset,
        nbytes=part.nbytes,
        checksum=stored.checksum,
        placement=part.item.placement,
        aliases=part.item.aliases,
    )
