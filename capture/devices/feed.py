"""Feeds the writer with the bytes of one snapshot that it can't read itself, in a thread: those of device tensors, and
those that are rounded.

Several blocks are on their way at once. A slot goes back to the writer only when its copy has ended, whatever happened
meanwhile; the writer hashes and writes it in threads of its own, so this one only has to keep the device busy.
"""

import contextlib
import ctypes
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

import native
from capture.devices.copies import GATHERED_BYTES, DeviceCopier, Piece, Transfer, coalesced
from capture.devices.digests import words_of
from capture.devices.rounding import RoundedPart
from capture.state.row_major import row_major

__all__ = ["Copies", "DevicePart", "FedPart", "FeedTake", "NoCopies"]

BLOCKS_IN_FLIGHT = 4
"""Blocks that one feeder copies at once, so that the device has the next ones while the feeder hands one over."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePart:
    """Elements `[begin, end)` of `tensor`, in the order of its dimensions, which have the dtype `stored` in the file.
    `keep`: the tensor must be cloned at the step, because the next forward changes it.
    """

    tensor: torch.Tensor
    begin: int
    end: int
    stored: torch.dtype
    keep: bool

    @property
    def nbytes(self) -> int:
        """How many bytes they have in the file."""
        return (self.end - self.begin) * self.stored.itemsize

    def held(self) -> "DevicePart":
        """Return the same elements of the memory that the tensor has now, whatever it is given later (`p.data = x`)."""
        return replace(self, tensor=self.tensor.detach())

    def memory(self) -> torch.Tensor | None:
        """Return the memory of these elements as a vector of words, in its own order; None when it is not in one
        piece.
        """
        tensor = self.tensor.detach()
        if self.end - self.begin == tensor.numel():
            return words_of(tensor)
        if not tensor.is_contiguous():
            return None
        return words_of(tensor.view(-1)[self.begin : self.end])

    def pieces(self, *, most_bytes: int) -> Iterator[Piece]:
        """Yield the bytes in order, in pieces of about `most_bytes`, each for the beginning of a slot."""
        size = self.stored.itemsize
        step = max(1, most_bytes // size)
        for at in range(self.begin, self.end, step):
            upto = min(self.end, at + step)
            yield Piece(row_major(self.tensor.detach(), at, upto), 0, (upto - at) * size, self.stored)


FedPart = DevicePart | RoundedPart
"""Bytes that a feeder supplies."""


class Copies(Protocol):
    """The copies of what one snapshot feeds to the writer."""

    @property
    def failure(self) -> Exception | None:
        """The error of the device, not of the writer; None while there is none."""

    @property
    def is_done(self) -> bool:
        """True once no copy is left."""

    def wait(self) -> None:
        """Return once no copy is left, so that the tensors may be overwritten. Idempotent, from any thread; never
        raises.
        """


class NoCopies:
    """The copies of a state of which the writer reads all bytes itself."""

    failure: Exception | None = None
    is_done = True

    def wait(self) -> None:
        """Nothing to wait for."""


class FeedTake:
    """The parts of a plan that are fed, as they are at the step: `parts` at these file `offsets`, in order, in blocks
    up to `end`. Made on the training thread, before anything else is given to the device. SetupError when the staging
    memory can't be pinned for it, UnsupportedError while a CUDA graph is captured.
    """

    def __init__(
        self,
        parts: Sequence[FedPart],
        offsets: Sequence[int],
        *,
        end: int,
        writer: native.Writer,
        copies: DeviceCopier,
    ) -> None:
        copies.require_running()
        self._sources = _sources([part for part in parts if isinstance(part, DevicePart)])
        if self._sources:
            copies.pin(writer)
            copies.begin(self._sources.values())
        self._parts = parts
        self._offsets = offsets
        self._end = end
        self._writer = writer
        self._copies = copies

    def feed(self, job: native.WriteJob) -> Copies:
        """Feed `job`, a file of `writer` with this layout, in the background."""
        return _Feeder(self, job, writer=self._writer, end=self._end)

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is new, for `copy`."""
        for source in list(self._sources.values())[:1]:
            self._copies.enter_thread(source.device)

    def copy(self, feed: native.Feed) -> Transfer:
        """Begin to copy the bytes of this block into its slot. What is rounded is there when this returns."""
        slot = torch.frombuffer((ctypes.c_ubyte * feed.nbytes).from_address(feed.address), dtype=torch.uint8)
        pieces = []
        rounded = []
        for i in range(max(0, bisect_right(self._offsets, feed.offset) - 1), len(self._parts)):
            offset, part = self._offsets[i], self._parts[i]
            begin = max(offset, feed.offset)
            end = min(offset + part.nbytes, feed.offset + feed.nbytes)
            if offset >= feed.offset + feed.nbytes:
                break
            if begin < end and isinstance(part, RoundedPart):
                rounded.append((part, slot[begin - feed.offset : end - feed.offset], begin - offset))
            elif begin < end and isinstance(part, DevicePart):
                # Blocks and parts begin at multiples of the item size, so no element is cut.
                size = part.stored.itemsize
                first, last = part.begin + (begin - offset) // size, part.begin + (end - offset) // size
                sources = row_major(self._sources[part], first, last)
                pieces.append(Piece(sources, begin - feed.offset, end - begin, part.stored))
        transfer: Transfer = self._copies.copy(coalesced(pieces), slot) if pieces else _Copied()
        with contextlib.ExitStack() as failing:
            # The slot is nobody else's before the device has filled its share, also when the host can't fill its own.
            failing.callback(transfer.wait)
            for one, target, skip in rounded:
                one.round_into(target, begin=skip)
            failing.pop_all()
        return transfer


class _Copied:
    """The transfer of a block that no device fills."""

    def wait(self) -> None:
        """Nothing to wait for."""


def _sources(parts: Sequence[DevicePart]) -> dict[DevicePart, torch.Tensor]:
    """Return the tensor of each part, or its clone where it is to be kept. Small ones are cloned together, because each
    operation costs the training thread more than their bytes: capturable optimizers keep one `step` a parameter.
    """
    sources = {part: part.tensor.detach() for part in parts}
    together: dict[tuple[torch.device, torch.dtype], list[DevicePart]] = {}
    for part, source in sources.items():
        if not part.keep:
            continue
        if source.is_contiguous() and source.nbytes < GATHERED_BYTES:
            together.setdefault((source.device, source.dtype), []).append(part)
        else:
            sources[part] = source.clone(memory_format=torch.contiguous_format)
    for group in together.values():
        joined = torch.cat([sources[part].view(-1) for part in group])
        for part, clone in zip(group, joined.split_with_sizes([part.tensor.numel() for part in group]), strict=True):
            sources[part] = clone
    return sources


class _Feeder:
    """The Copies of a `FeedTake`. A failure of the device fails the job; a failure of the job ends the feeding."""

    def __init__(self, take: FeedTake, job: native.WriteJob, *, writer: native.Writer, end: int) -> None:
        self.failure: Exception | None = None
        # The writer's memory is unpinned when the writer is gone, which must not be while copies are on their way.
        self._writer = writer
        self._end = end
        self._left = threading.Event()
        threading.Thread(target=self._run, args=(take, job), name="dshistory-feed", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._left.is_set()

    def wait(self) -> None:
        self._left.wait()

    def _run(self, take: FeedTake, job: native.WriteJob) -> None:
        try:
            take.enter_thread()
            self._feed(take, job)
        except Exception as error:  # noqa: BLE001 - those who wait for the job, or at the barrier, report it
            if not isinstance(error, OSError):
                self.failure = self.failure or error
            job.abort()
        finally:
            self._left.set()

    def _feed(self, take: FeedTake, job: native.WriteJob) -> None:
        flying: deque[tuple[native.Feed, Transfer]] = deque()
        try:
            while True:
                feed = job.feed_next() if len(flying) < BLOCKS_IN_FLIGHT else None
                if feed is not None:
                    with self._failing(job, feed):
                        flying.append((feed, take.copy(feed)))
                elif flying:
                    self._finish_oldest(job, *flying.popleft())
                else:
                    return
        finally:
            # Each one, also when several fail: a slot that is dropped here would be lent again under its copy.
            while flying:
                with contextlib.suppress(Exception):
                    self._finish_oldest(job, *flying.popleft())

    def _finish_oldest(self, job: native.WriteJob, feed: native.Feed, transfer: Transfer) -> None:
        with self._failing(job, feed):
            transfer.wait()
        if feed.offset + feed.nbytes == self._end:
            self._left.set()
        job.fed(feed)

    @contextlib.contextmanager
    def _failing(self, job: native.WriteJob, feed: native.Feed) -> Iterator[None]:
        """On an error of the device, fail the job and give the slot back."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            job.abort()
            job.fed(feed)
            raise
