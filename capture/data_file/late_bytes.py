"""Bytes that get their place in the file when it is being written already: parts that have changed after all, and the
large tensors of objects.

They are written behind the planned bytes straight from the training's memory, through one small buffer. Threads do it,
and the barrier waits until they have read the last byte.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

import native
from capture.background_thread import BackgroundThread
from capture.changes.change_detector import ChangeDetector, Watched
from capture.data_file.data_file import Piece, PlacedObject, PlacedPiece, pad_piece, piece_of_tensor
from capture.devices.copies import DeviceCopier
from capture.devices.feed import DevicePart
from capture.state.interface import TensorItem
from capture.state.objects import LiveTensor
from catalog.records import CHECKSUM_BYTES

__all__ = ["BackgroundReader", "Chunk", "ObjectTensors", "append", "chunks_of"]

_HOST_CHUNK_BYTES = 4 << 20
"""The host memory through which the tensors of a device pass."""

Chunk = tuple[int, int]
"""The address and the number of some bytes in host memory, valid until the next one is asked for."""


class BackgroundReader:
    """Reads the training's memory in a thread of its own; what it found may be taken after `wait` or `require`."""

    def __init__(self, work: Callable[[], None] | None, *, name: str) -> None:
        """Begin with `work`, which may use all of `self`: to be called last. None where there is nothing to read."""
        self._failure: Exception | None = None
        self._thread = None if work is None else BackgroundThread(partial(self._run, work), name=name)

    @property
    def is_done(self) -> bool:
        """True once no live byte is read any more."""
        return self._thread is None or self._thread.has_ended

    def wait(self) -> None:
        """Return once no live byte is read any more."""
        if self._thread is not None:
            self._thread.wait()

    def require(self) -> None:
        """Wait, and raise what failed: OSError (EFAULT) when memory is gone."""
        self.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised by `require`, in the thread that can report it
            self._failure = error


def append(job: native.WriteJob, pieces: Sequence[Piece], chunks: Iterable[Chunk], *, align: int) -> list[PlacedPiece]:
    """Write `pieces`, whose bytes are those of `chunks`, behind all that the file has so far; return where they are,
    and the padding behind them. They lie back to back: give them by falling item size.
    """
    appendix = job.append(np.array([piece.nbytes for piece in pieces], dtype=np.uint64))
    for address, nbytes in chunks:
        appendix.add(address=address, nbytes=nbytes)
    digests = appendix.end()
    at = appendix.offset
    placed = []
    for i, piece in enumerate(pieces):
        placed.append(PlacedPiece(piece, at, digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]))
        at += piece.nbytes
    pad = -at % align
    if pad:
        # Named by its place: a file has a padding behind each time that something was appended.
        placed.append(PlacedPiece(pad_piece(f"at.{at}", pad), at, native.checksum(bytes(pad))))
    return placed


def chunks_of(part: DevicePart, copies: DeviceCopier) -> Iterator[Chunk]:
    """Yield the bytes of a device's tensor as they pass through a little host memory. For a thread that has entered."""
    chunk = copies.host_memory(min(_HOST_CHUNK_BYTES, part.nbytes))
    for piece in part.pieces(most_bytes=len(chunk)):
        copies.copy([piece], chunk).wait()
        yield chunk.data_ptr(), piece.nbytes


class ObjectTensors(BackgroundReader):
    """Writes the live tensors of a snapshot's objects, as they are now, in a thread; their memory must stay until
    `wait` returns. To be made on the training thread. `after`: what appends to the same file first.

    After `wait`, `placed` has the pieces, and `changed` names the tensors that were written to meanwhile.
    """

    def __init__(
        self,
        objects: Sequence[PlacedObject],
        job: native.WriteJob,
        *,
        align: int,
        copies: DeviceCopier,
        after: Callable[[], None],
    ) -> None:
        found = [
            (piece_of_tensor(name, live.tensor, placed), live)
            for placed in objects
            for name, live in placed.encoded.live.items()
        ]
        found.sort(key=lambda pair: -pair[0].itemsize)
        self.placed: list[PlacedPiece] = []
        self._pieces = [piece for piece, _ in found]
        self._tensors = [live for _, live in found]
        self._job = job
        self._align = align
        self._copies = copies
        self._after = after
        self.changed: list[str] = []
        self._detector = _watching(self._tensors, copies)
        # Nothing counts the writes to an array: the bytes that are written are compared with those of now.
        self._digests = {i: _digest(live.tensor) for i, live in enumerate(self._tensors) if live.of_numpy}
        self._on_device = [live.tensor for live in self._tensors if copies.owns(live.tensor)]
        copies.begin(self._on_device)
        super().__init__(self._append if found else None, name="dshistory-objects")

    def let_go(self) -> None:
        """Hold none of the tensors any more. To be called after `wait`."""
        self._tensors, self._on_device = [], []
        self._detector.let_go()

    def _append(self) -> None:
        self._after()
        for device in {tensor.device for tensor in self._on_device}:
            self._copies.enter_thread(device)
        try:
            self.placed = append(self._job, self._pieces, self._chunks(), align=self._align)
        finally:
            self.changed = self._detector.compare_beside().changed()
        arrays = self._digests.items()
        differing = [f"object {self._tensors[i].path!r}" for i, then in arrays if self.placed[i].checksum != then]
        self.changed += [label for label in differing if label not in self.changed]

    def _chunks(self) -> Iterator[Chunk]:
        for live in self._tensors:
            if self._copies.owns(live.tensor):
                yield from chunks_of(_whole(live.tensor), self._copies)
            else:
                yield live.tensor.data_ptr(), live.tensor.nbytes


def _watching(tensors: Sequence[LiveTensor], copies: DeviceCopier) -> ChangeDetector:
    items = [TensorItem(live.path, "object", tuple(live.tensor.shape), live.tensor) for live in tensors]
    addresses = [live.tensor.data_ptr() for live in tensors]
    nbytes = [0 if copies.owns(live.tensor) else live.tensor.nbytes for live in tensors]
    return ChangeDetector(Watched(items, addresses=addresses, nbytes=nbytes, copies=copies))


def _whole(tensor: torch.Tensor) -> DevicePart:
    return DevicePart(tensor, 0, tensor.numel(), tensor.dtype, keep=False)


def _digest(tensor: torch.Tensor) -> bytes:
    return native.checksum(tensor.view(-1).view(torch.uint8).numpy())
