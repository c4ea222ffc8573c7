"""State that rests: a committed checkpoint of the run has its bytes, so they are referred to and not written again.

The guess is made from the past: what had the same checksum in two checkpoints is expected to have it in the next. It is
hashed while the training goes on, and what is different after all goes behind the planned bytes.
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
    """Where the bytes of a part are, in a committed checkpoint."""

    file: str
    offset: int
    checksum: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A rank's part of a checkpoint: the checksums of what it wrote, the keys of what was expected to rest and did not, and
    what it cost.
    """

    step: int
    file: str
    plan: Plan
    checksums: bytes
    moved: frozenset[str]
    figures: Mapping[str, float]

    def checksum(self, index: int) -> bytes:
        """That of one part of the plan."""
        return self.checksums[CHECKSUM_BYTES * index : CHECKSUM_BYTES * (index + 1)]


class Deduplicator:
    """What of a rank's state rests, learned from what it publishes. `committed` says whether a step's checkpoint exists:
    nothing else is referred to. `places` is replaced, never changed, so that any thread may take it.
    """

    def __init__(self, committed: Callable[[int], bool]) -> None:
        self.places: Mapping[str, StoredAt] = {}
        self._committed = committed
        self._waiting: deque[Published] = deque(maxlen=_MAX_WAITING)
        self._last: Published | None = None
        self._restless: set[str] = set()

    def published(self, part: Published) -> None:
        """Learn from a part once its checkpoint is committed, which other ranks may do later."""
        self._forget(part.moved)
        self._waiting.append(part)
        while any(self._committed(waiting.step) for waiting in self._waiting):
            # What comes before a committed one and is not committed itself has failed on another rank.
            first = self._waiting.popleft()
            if self._committed(first.step):
                self._learn(first)

    def _forget(self, moved: frozenset[str]) -> None:
        """A wrong guess is made once: what moves unseen now and then would be laid out anew each time."""
        if moved:
            self._restless |= moved
            self.places = {key: place for key, place in self.places.items() if key not in moved}

    def _learn(self, now: Published) -> None:
        last, self._last = self._last, now
        if last is None:
            return
        found = {key: place for key, place in _unchanged(last, now).items() if key not in self._restless}
        if found:
            self.places = {**self.places, **found}


class UnchangedCheck:
    """Parts that are expected to rest, being hashed by a thread of its own; their memory must stay until `wait` returns.

    `references` are the manifest rows of those that do, `moved` the bytes of the others; both after `wait`.
    """

    def __init__(self, parts: Sequence[Part], places: Mapping[str, StoredAt]) -> None:
        self.references: list[Extent] = []
        self.moved: list[tuple[Part, bytes]] = []
        self._parts = parts
        self._places = places
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if parts:
            self._thread = threading.Thread(target=self._look, name="dshistory-hash", daemon=True)
            self._thread.start()

    @property
    def unchanged_bytes(self) -> int:
        """Bytes that are referred to."""
        return sum(extent.nbytes for extent in self.references)

    def wait(self) -> None:
        """Return once no live byte is read any more."""
        if self._thread is not None:
            self._thread.join()

    def require(self) -> None:
        """Wait; what failed is raised here: OSError (EFAULT) when memory is gone."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _look(self) -> None:
        try:
            digests = native.checksum_memory(
                addresses=np.array([part.address for part in self._parts], dtype=np.uint64),
                nbytes=np.array([part.nbytes for part in self._parts], dtype=np.uint64),
            )
            for i, part in enumerate(self._parts):
                place = self._places[part.key]
                if digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)] == place.checksum:
                    self.references.append(_reference(part, place))
                else:
                    self.moved.append((part, ctypes.string_at(part.address, part.nbytes)))
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


def _reference(part: Part, place: StoredAt) -> Extent:
    return Extent(
        name=part.item.name,
        kind=part.item.kind,
        dtype=part.dtype,
        shape=part.item.shape,
        start=part.start,
        numel=part.numel,
        file=place.file,
        offset=place.offset,
        nbytes=part.nbytes,
        checksum=place.checksum,
        placement=part.item.placement,
        aliases=part.item.aliases,
    )
