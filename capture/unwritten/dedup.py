"""Deduplication: state that is unchanged since a committed checkpoint of the run is referred to, not written again.

A prediction comes first, because a part that is referred to gets no place in the planned file. A new part is sampled
when it is first written. In the next snapshot it is expected to be unchanged if its sample is the same; later, if it
had the same checksum in two checkpoints. What is expected is hashed while the training goes on, all of it, and only a
part whose checksum is the stored one is referred to. The others (mispredicted) are written behind the planned bytes,
from where they are.

The host can't hash the memory of a device. The first time, the stored bytes of such a part are read back, and the
device compares them with its own; from then on it compares digests of its memory, which it has computed beside that.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import native
from capture.data_file.data_file import PlacedPiece, piece_of_part
from capture.data_file.late_bytes import BackgroundReader, Chunk, append, chunks_of
from capture.data_file.parts import Part
from capture.data_file.plan import Plan, Referable
from capture.devices.copies import DeviceCopier, Piece
from capture.devices.digests import DeviceDigests, sample_of
from capture.devices.feed import DevicePart
from catalog.data_files.stored_bytes import read_unverified
from catalog.errors import CorruptError
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = ["Deduplicator", "Published", "Samples", "StoredAt", "UnchangedCheck"]

_MAX_WAITING = 8

_READ_BACK_BYTES = 4 << 20
"""The host memory through which stored bytes pass on their way to a device."""

_LEAST_SHARED_BYTES = 64 << 10
"""A checkpoint that others refer to can't be removed before them, whole as it is: for fewer bytes none is held."""

Samples = Callable[[], Mapping[str, bytes]]
"""Gives digests of samples of some parts, by key, once devices have computed theirs."""


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The place of a part's bytes in a committed checkpoint, and their checksum. `digest`: that of a device's memory
    which was found equal to them; None while none was. It is one of as many bytes only: zeros have the same digest
    whatever their number.
    """

    file: str
    offset: int
    nbytes: int
    checksum: bytes
    digest: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """A rank's published part of a checkpoint: the parts that may be referred to, the checksums of all parts in its
    plan, the keys of the mispredicted ones, the figures of its cost, the samples of new parts, and by key the digests
    of memory that was found equal to stored bytes.
    """

    step: int
    file: str
    parts: Referable
    checksums: bytes
    mispredicted: frozenset[str]
    figures: Mapping[str, float]
    samples: Mapping[str, bytes] = field(default_factory=dict)
    digests: Mapping[str, bytes] = field(default_factory=dict)

    def checksum(self, index: int) -> bytes:
        """Return the checksum of one part of the plan."""
        return self.checksums[CHECKSUM_BYTES * index : CHECKSUM_BYTES * (index + 1)]

    def stored_at(self, key: str) -> StoredAt:
        """Return the place of one of the parts that may be referred to."""
        index = self.parts.indices[key]
        return StoredAt(self.file, self.parts.offsets[index], self.parts.nbytes[index], self.checksum(index))


class Deduplicator:
    """Learns from the parts that a rank publishes which of its state stays unchanged. `committed` says whether a step's
    checkpoint exists: nothing else may be referred to. `pin` keeps a step's checkpoint from being removed as long as
    the run is written, and returns False when it is gone already.

    `stored` are the parts that are expected to be unchanged, by key. It is replaced, never changed, so that any thread
    may take it, and stays the same mapping as long as the expectation does: a plan is kept with it.
    """

    def __init__(self, committed: Callable[[int], bool], *, pin: Callable[[int], bool] = lambda step: True) -> None:
        self.stored: Mapping[str, StoredAt] = {}
        self._committed = committed
        self._pin = pin
        self._changing = threading.Lock()
        self._waiting: deque[Published] = deque(maxlen=_MAX_WAITING)
        self._last: Published | None = None
        self._unpredictable: set[str] = set()
        self._bases: set[int] = set()
        self._sampled: set[str] = set()
        self._undecided: dict[str, tuple[bytes, StoredAt, int]] = {}

    def expect_unchanged(self, plan: Plan) -> bool:
        """Expect those parts of `plan` to be unchanged whose sample is that of their first checkpoint, which is
        committed. Return whether there are any: then the plan is to be made anew. To be called at the step: it waits
        for a device that has to sample, which happens once for each part.
        """
        with self._changing:
            asked = plan.parts_of(self._undecided.keys())
            if not asked:
                return False
            now = _samples_of(asked)()
            decided = {key: self._undecided.pop(key) for key in now}
            nbytes = {part.key: part.nbytes for part in asked}
            same = {key: one for key, one in decided.items() if (now[key], nbytes[key]) == (one[0], one[1].nbytes)}
            found: dict[str, StoredAt] = {}
            for step in {step for _, _, step in same.values()}:
                of_step = {key: stored for key, (_, stored, at) in same.items() if at == step}
                if self._may_refer_to(step, sum(nbytes[key] for key in of_step)):
                    found |= of_step
            if found:
                self.stored = {**self.stored, **found}
            return bool(found)

    def sample_new(self, plan: Plan) -> Samples:
        """Sample the parts of `plan` that are written for the first time. To be called at the step."""
        new = plan.parts_of(plan.referable.indices.keys() - self._sampled)
        self._sampled.update(part.key for part in new)
        return _samples_of(new)

    def published(self, part: Published) -> None:
        """Learn from a part once its checkpoint is committed, which other ranks may do later."""
        with self._changing:
            self._note(part)
            self._waiting.append(part)
            while any(self._committed(waiting.step) for waiting in self._waiting):
                # A step before a committed one that is not committed itself has failed on another rank.
                first = self._waiting.popleft()
                if self._committed(first.step):
                    self._learn(first)

    def _note(self, part: Published) -> None:
        """Keep the digests, and never expect mispredicted parts again: one that changes now and then would cost a new
        plan each time.
        """
        if part.mispredicted or part.digests:
            self._unpredictable |= part.mispredicted
            self.stored = {
                key: replace(at, digest=part.digests.get(key, at.digest))
                for key, at in self.stored.items()
                if key not in part.mispredicted
            }

    def _learn(self, now: Published) -> None:
        last, self._last = self._last, now
        for key, sample in now.samples.items():
            self._undecided[key] = sample, now.stored_at(key), now.step
        if last is None:
            return
        # Snapshots that were planned before have written once more what is known already, and need not stay for it.
        unchanged = _unchanged(last, now) - self._unpredictable - self._undecided.keys() - self.stored.keys()
        nbytes = sum(now.parts.nbytes[now.parts.indices[key]] for key in unchanged)
        if unchanged and self._may_refer_to(now.step, nbytes):
            self.stored = {**self.stored, **{key: now.stored_at(key) for key in unchanged}}

    def _may_refer_to(self, step: int, nbytes: int) -> bool:
        """Return whether so many bytes are worth it that the checkpoint of `step` stays as long as others refer to it,
        and that nobody has removed it.
        """
        if step not in self._bases:
            if nbytes < _LEAST_SHARED_BYTES or not self._pin(step):
                return False
            self._bases.add(step)
        return True


class UnchangedCheck(BackgroundReader):
    """Hashes parts that are expected to be unchanged, in a thread, and appends those that are not to `job`'s file;
    their memory must stay until `wait` returns. To be made on the training thread. `root`: the history's folder.

    After `wait`, `references` has the manifest rows of the unchanged parts, `mispredicted` the keys of the others, and
    `placed` says where these are; `digests` are those of devices that were found equal to stored bytes, by key.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stored: Mapping[str, StoredAt],
        job: native.WriteJob,
        *,
        root: Path,
        align: int,
        copies: DeviceCopier,
    ) -> None:
        self.references: list[Extent] = []
        self.mispredicted: frozenset[str] = frozenset()
        self.placed: list[PlacedPiece] = []
        self.digests: dict[str, bytes] = {}
        self._parts = [part if part.device is None else replace(part, device=part.device.held()) for part in parts]
        self._stored = stored
        self._job = job
        self._root = root
        self._align = align
        self._copies = copies
        copies.begin([part.device.tensor for part in parts if part.device is not None])
        super().__init__(self._hash if parts else None, name="dshistory-hash")

    @property
    def unchanged_bytes(self) -> int:
        """The number of bytes that are referred to."""
        return sum(extent.nbytes for extent in self.references)

    def _hash(self) -> None:
        # A part of another length, as after a change of its dtype, is another one.
        as_long = [part for part in self._parts if part.nbytes == self._stored[part.key].nbytes]
        on_device = [part for part in as_long if part.device is not None]
        for device in {part.item.tensor.device for part in self._parts if part.device is not None}:
            self._copies.enter_thread(device)
        same = self._same_in_host([part for part in as_long if part.device is None])
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
            here = [part for part in parts if part.item.tensor.device == device]
            with self._copies.beside(device):
                found = _digests_of(here)
                same |= {key for key, digest in found.items() if digest == self._stored[key].digest}
                unproved = [part for part in here if self._stored[part.key].digest is None]
                equal = [part for part in unproved if self._equals_stored(part)]
                # What is kept stands for the bytes that were compared: it is that of before and after.
                again = _digests_of(equal)
                self.digests |= {key: digest for key, digest in again.items() if digest == found[key]}
        return same | self.digests.keys()

    def _equals_stored(self, part: Part) -> bool:
        """Read the stored bytes of a part back, check them, and let its device compare its own with them."""
        assert part.device is not None
        stored = self._stored[part.key]
        extent = _reference(part, stored)
        try:
            for piece, read in _stored_pieces(self._root, extent, part.device):
                if not bool((piece.joined() == read.to(part.item.tensor.device)).all()):
                    return False
        except CorruptError:
            # A damaged file is nothing to refer to; verify names it.
            return False
        return True

    def _chunks(self, parts: Sequence[Part]) -> Iterator[Chunk]:
        for part in parts:
            if part.device is not None:
                yield from chunks_of(part.device, self._copies)
            elif part.rounded is not None:
                yield from ((piece.data_ptr(), piece.nbytes) for piece in part.rounded.pieces())
            else:
                yield part.address, part.nbytes


def _stored_pieces(root: Path, extent: Extent, part: DevicePart) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield the pieces of `part` in order, each with the bytes that are stored for it, uint8 host memory that is valid
    until the next one is asked for. CorruptError when these can't be read, or, at the end, when all of them together
    have not the extent's checksum.
    """
    running = native.RunningChecksum()
    memory = torch.empty(min(_READ_BACK_BYTES, extent.nbytes), dtype=torch.uint8)
    at = 0
    for piece in part.pieces(most_bytes=len(memory)):
        read = memory[: piece.nbytes]
        read_unverified(root, extent, read.data_ptr(), skip_bytes=at, nbytes=piece.nbytes)
        running.add(read.numpy())
        at += piece.nbytes
        yield piece, read
    if running.end() != extent.checksum:
        raise CorruptError(
            f"{root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: the bytes have not the "
            "checksum that they were written with: the file is damaged"
        )


def _samples_of(parts: Sequence[Part]) -> Samples:
    """Read a sample of each part's memory, as all work that the calling thread has given to devices leaves it. Returns
    at once; what it returns waits for the devices, in any thread, and holds no memory.
    """
    host = [part for part in parts if part.device is None]
    digests = native.sampled_digests(
        addresses=np.array([part.address for part in host], dtype=np.uint64),
        nbytes=np.array([part.bytes_in_host for part in host], dtype=np.uint64),
    )
    found = {part.key: digests[8 * i : 8 * (i + 1)] for i, part in enumerate(host)}
    memory = _memory_of(parts)
    keys, reading = list(memory), DeviceDigests([sample_of(words) for words in memory.values()]).read()
    return lambda: {**found, **dict(zip(keys, reading.digests(), strict=True))}


def _digests_of(parts: Iterable[Part]) -> dict[str, bytes]:
    """Let devices compute the digests of their parts, and wait for them."""
    memory = _memory_of(parts)
    return dict(zip(memory, DeviceDigests(list(memory.values())).read().digests(), strict=True))


def _memory_of(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    memory = {part.key: part.device.memory() for part in parts if part.device is not None}
    return {key: words for key, words in memory.items() if words is not None}


def _unchanged(last: Published, now: Published) -> set[str]:
    parts = now.parts
    if last.parts is parts:
        digest = np.dtype(f"V{CHECKSUM_BYTES}")
        same = np.frombuffer(last.checksums, digest) == np.frombuffer(now.checksums, digest)
        return {key for key, i in parts.indices.items() if same[i]}
    before = last.parts.indices
    return {key for key, i in parts.indices.items() if key in before and last.checksum(before[key]) == now.checksum(i)}


def _reference(part: Part, stored: StoredAt) -> Extent:
    return part.row(file=stored.file, offset=stored.offset, checksum=stored.checksum)
