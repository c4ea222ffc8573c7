"""Deduplication: state that is unchanged since a committed checkpoint of the run is referred to, not written again.

The prediction is made from the past: a part that had the same checksum in two checkpoints is expected to have it in the
next. Such parts get no place in the planned file. They are hashed while the training goes on, and those that are
different after all (mispredicted) are written behind the planned bytes.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import native
from capture.snapshot.parts import Part, can_be_referenced
from capture.snapshot.plan import Plan
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
    """A rank's published part of a checkpoint: the checksums of the parts in its plan, the keys of the mispredicted
    ones, and the figures of its cost.
    """

    step: int
    file: str
    plan: Plan
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
    """Hashes parts that are expected to be unchanged, in a thread; their memory must stay until `wait` returns.

    After `wait`, `references` has the manifest rows of the unchanged parts, `mispredicted` the others with their bytes.
    """

    def __init__(self, parts: Sequence[Part], stored: Mapping[str, StoredAt]) -> None:
        self.references: list[Extent] = []
        self.mispredicted: list[tuple[Part, bytes]] = []
        self._parts = parts
        self._stored = stored
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if parts:
            self._thread = threading.Thread(target=self._hash, name="dshistory-hash", daemon=True)
            self._thread.start()

    @property
    def unchanged_bytes(self) -> int:
        """The number of bytes that are referred to."""
        return sum(extent.nbytes for extent in self.references)

    def wait(self) -> None:
        """Return once no live byte is read any more."""
        if self._thread is not None:
            self._thread.join()

    def require(self) -> None:
        """Wait, and raise what failed: OSError (EFAULT) when memory is gone."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _hash(self) -> None:
        try:
            digests = native.checksum_memory(
                addresses=np.array([part.address for part in self._parts], dtype=np.uint64),
                nbytes=np.array([part.nbytes for part in self._parts], dtype=np.uint64),
            )
            for i, part in enumerate(self._parts):
                stored = self._stored[part.key]
                if digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)] == stored.checksum:
                    self.references.append(_reference(part, stored))
                else:
                    self.mispredicted.append((part, ctypes.string_at(part.address, part.nbytes)))
        except Exception as error:  # noqa: BLE001 - raised by `require`, in the thread that can report it
            self._failure = error


def _unchanged(last: Published, now: Published) -> dict[str, StoredAt]:
    parts = now.plan.parts
    if last.plan is now.plan:
        digest = np.dtype(f"V{CHECKSUM_BYTES}")
        same = np.flatnonzero(np.frombuffer(last.checksums, digest) == np.frombuffer(now.checksums, digest)).tolist()
    else:
        known = {part.key: last.checksum(i) for i, part in enumerate(last.plan.parts)}
        same = [i for i, part in enumerate(parts) if known.get(part.key) == now.checksum(i)]
    return {
        parts[i].key: StoredAt(now.file, now.plan.offsets[i], now.checksum(i))
        for i in same
        if can_be_referenced(parts[i])
    }


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
