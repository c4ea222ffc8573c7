"""Deduplication: state that is unchanged since a committed checkpoint of the run is referred to, not written again.

The prediction is made from the past: a part that had the same checksum in two checkpoints is expected to have it in the
next. Such parts get no place in the planned file. They are hashed while the training goes on, and those that are
different after all (mispredicted) are written behind the planned bytes, from where they are.

Parts in a device's memory are compared by digests that the device computes. The first one is computed at the step, in
the order of the training's work, in a checkpoint that still writes the part: its bytes leave the device later. When
they are also those of the checkpoint before, they are what the digest is of.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

import native
from capture.devices.copies import DeviceCopier
from capture.devices.digests import DeviceDigests
from capture.snapshot.data_file import PlacedPiece, piece_of_part
from capture.snapshot.late_bytes import Background, Chunk, append, chunks_of
from capture.snapshot.parts import Part
from capture.snapshot.plan import Referable
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = ["Deduplicator", "Expected", "Published", "StoredAt", "UnchangedCheck", "digests_of"]

_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The place of a part's bytes in a committed checkpoint, and their checksum. `digest`: that of a device, for a part
    in its memory.
    """

    file: str
    offset: int
    checksum: bytes
    digest: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The parts that the next snapshot is expected to find unchanged, by key: `stored` are those that have not changed
    since, `settled` those of a device that have not changed lately, of which a digest is wanted.
    """

    stored: Mapping[str, StoredAt] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A rank's published part of a checkpoint: the parts that may be referred to, the checksums of all parts in its
    plan, the keys of the mispredicted ones, the figures of its cost, and a device's digests by key.
    """

    step: int
    file: str
    parts: Referable
    checksums: bytes
    mispredicted: frozenset[str]
    figures: Mapping[str, float]
    digests: Mapping[str, bytes] = field(default_factory=dict)

    def checksum(self, index: int) -> bytes:
        """Return the checksum of one part of the plan."""
        return self.checksums[CHECKSUM_BYTES * index : CHECKSUM_BYTES * (index + 1)]


class Deduplicator:
    """Learns from the parts that a rank publishes which of its state stays unchanged. `committed` says whether a step's
    checkpoint exists: nothing else may be referred to. `pin` keeps a step's checkpoint from being removed as long as
    the run is written, and returns False when it is gone already.

    `expected` is replaced, never changed, so that any thread may take it.
    """

    def __init__(self, committed: Callable[[int], bool], *, pin: Callable[[int], bool] = lambda step: True) -> None:
        self.expected = Expected()
        self._committed = committed
        self._pin = pin
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
            stored = {key: at for key, at in self.expected.stored.items() if key not in mispredicted}
            self.expected = Expected(stored, self.expected.settled - mispredicted)

    def _learn(self, now: Published) -> None:
        last, self._last = self._last, now
        if last is None:
            return
        found = {key: at for key, at in _unchanged(last, now).items() if key not in self._unpredictable}
        known = {key: at for key, at in found.items() if at.digest is not None or key not in now.parts.on_device}
        settled = frozenset(found.keys() - known.keys())
        if known and not self._pin(now.step):
            # Nothing refers to it yet, so it could be removed.
            return
        if known or settled != self.expected.settled:
            # The same mapping as long as nothing is added to it: a plan is kept with it.
            stored = {**self.expected.stored, **known} if known else self.expected.stored
            self.expected = Expected(stored, settled)


class UnchangedCheck:
    """Hashes parts that are expected to be unchanged, in a thread, and appends those that are not to `job`'s file;
    their memory must stay until `wait` returns. To be made on the training thread.

    After `wait`, `references` has the manifest rows of the unchanged parts, `mispredicted` the keys of the others, and
    `placed` says where these are.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stored: Mapping[str, StoredAt],
        job: native.WriteJob,
        *,
        align: int,
        copies: DeviceCopier,
    ) -> None:
        self.references: list[Extent] = []
        self.mispredicted: frozenset[str] = frozenset()
        self.placed: list[PlacedPiece] = []
        self._parts = parts
        self._stored = stored
        self._job = job
        self._align = align
        self._copies = copies
        copies.begin([part.device.tensor for part in parts if part.device is not None])
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
        on_device = [part for part in self._parts if part.device is not None]
        for device in {part.item.tensor.device for part in on_device}:
            self._copies.enter_thread(device)
        same = self._same_in_host([part for part in self._parts if part.device is None])
        same |= self._same_on_device(on_device)
        self.references = [_reference(part, self._stored[part.key]) for part in self._parts if part.key in same]
        mispredicted = [part for part in self._parts if part.key not in same]
        if mispredicted:
            mispredicted.sort(key=lambda part: -part.itemsize)
            pieces = [piece_of_part(part) for part in mispredicted]
            self.placed = append(self._job, pieces, self._chunks(mispredicted), align=self._align)
            self.mispredicted = frozenset(part.key for part in mispredicted)

    def _same_in_host(self, parts: Sequence[Part]) -> set[str]:
        same = {
            part.key
            for part in parts
            if part.rounded is not None and part.rounded.checksum() == self._stored[part.key].checksum
        }
        parts = [part for part in parts if part.rounded is None]
        checksums = native.checksum_memory(
            addresses=np.array([part.address for part in parts], dtype=np.uint64),
            nbytes=np.array([part.nbytes for part in parts], dtype=np.uint64),
        )
        found = [checksums[at : at + CHECKSUM_BYTES] for at in range(0, len(checksums), CHECKSUM_BYTES)]
        pairs = zip(parts, found, strict=True)
        return same | {part.key for part, checksum in pairs if checksum == self._stored[part.key].checksum}

    def _same_on_device(self, parts: Sequence[Part]) -> set[str]:
        same = set()
        for device in {part.item.tensor.device for part in parts}:
            with self._copies.beside(device):
                found = digests_of([part for part in parts if part.item.tensor.device == device])
                same |= {key for key, digest in found().items() if digest == self._stored[key].digest}
        return same

    def _chunks(self, parts: Sequence[Part]) -> Iterator[Chunk]:
        for part in parts:
            if part.device is not None:
                yield from chunks_of(part.device, self._copies)
            elif part.rounded is not None:
                yield from ((piece.data_ptr(), piece.nbytes) for piece in part.rounded.pieces())
            else:
                yield part.address, part.nbytes


def digests_of(parts: Iterable[Part]) -> Callable[[], Mapping[str, bytes]]:
    """Let devices compute the digests of their parts as all work that the calling thread has given to them leaves them.
    Returns at once what waits for them and gives them by key, in any thread.
    """
    memory = {part.key: None if part.device is None else part.device.memory() for part in parts}
    vectors = {key: words for key, words in memory.items() if words is not None}
    # What is returned holds the keys and no memory.
    keys, reading = list(vectors), DeviceDigests(list(vectors.values())).read()
    return lambda: dict(zip(keys, reading.digests(), strict=True))


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
    return {key: StoredAt(now.file, parts.offsets[i], now.checksum(i), now.digests.get(key)) for key, i in found}


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
