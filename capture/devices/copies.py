"""From device memory to host memory: copies that run beside the training, ordered with it by events.

Host tensors need none of this: they are written from where they are, or rounded (`rounding`). The bytes of device
tensors go into slots of the writer's own staging budget, block by block, in the background (`feed`):
  1. At the step, on the training thread, tensors that the next forward changes are cloned on the device; then
     `DeviceCopier.begin`. While a CUDA graph is captured, `require_running` refuses before anything is recorded.
  2. In the background, `DeviceCopier.copy` into slot after slot; work that comes after `begin` on the training's stream
     may run beside it.
  3. The barrier waits until the last copy has ended, before the next update may be given to the device.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

import native
from capture.devices.marks import CUDA_MARKS
from catalog.errors import SetupError, UnsupportedError

__all__ = ["CUDA", "GATHERED_BYTES", "CudaDeviceCopier", "DeviceCopier", "Mirror", "Piece", "Transfer", "coalesced"]

GATHERED_BYTES = 1 << 20
"""Smaller pieces are gathered on the device first: to give the device a copy of its own takes some 20 microseconds, in
which it copies as much.
"""

_FOR_EVERY_DEVICE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A contiguous host copy of `source`, a host tensor that is not dense, to be made anew at every snapshot."""

    host: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes that lie side by side at one position of the slot: those of `sources`, tensors of one device and dtype,
    each in the order of its dimensions, rounded to `dtype`.
    """

    sources: Sequence[torch.Tensor]
    position: int
    nbytes: int
    dtype: torch.dtype

    def joined(self) -> torch.Tensor:
        """Return the bytes as a vector: a view of one contiguous source, else a copy that one operation makes, and one
        more where they are rounded, in the order of the work that the calling thread gives to the device.
        """
        flat = [source.reshape(-1) for source in self.sources]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.dtype).view(torch.uint8)


class Transfer(Protocol):
    """The copies into one slot, on their way."""

    def wait(self) -> None:
        """Return once they have ended: the slot is filled, the sources may be overwritten."""


class DeviceCopier(Protocol):
    """Copies device tensors while the training computes. The surface is this small so that the order in which it is
    used can be tested without a device.
    """

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` must be copied by this, because the writer can't read its memory."""

    def pin(self, writer: native.Writer) -> None:
        """Make the staging memory of `writer` fit for copies. Idempotent. SetupError when the device refuses."""

    def unpin(self, writer: native.Writer) -> None:
        """Undo `pin`, before the writer is closed; no copy may be on its way. Idempotent."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return uint8 memory for a few transfers that don't go through a writer's, fit for copies. RuntimeError when
        the device refuses.
        """

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make every `copy`, and all work `beside`, from now on see these tensors as all work given to the device so
        far leaves them. For the training thread; returns at once.
        """

    def require_running(self) -> None:
        """Raise UnsupportedError while the calling thread's work is only recorded and not done, as in the capture of a
        CUDA graph: there is no state to read, and what is given to the device would become part of the graph.
        """

    def enter_thread(self, device: torch.device) -> None:
        """Prepare the calling thread, which is new, for `copy` from `device` and for `beside` it."""

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> Transfer:
        """Begin to copy into `slot`, uint8 host memory, which should be pinned. From any thread that has entered;
        returns at once. The caller holds the sources until the transfer was waited for. After an error nothing writes
        into the slot any more.
        """

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Let the work that the calling thread, which has entered, gives to `device` in this context be done beside the
        training, behind the last `begin`. Its results must be waited for inside.
        """


def coalesced(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same bytes in fewer pieces: small ones that are neighbours in the slot become one."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _may_join(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _may_join(before: Piece, piece: Piece) -> bool:
    return (
        before.nbytes < GATHERED_BYTES
        and piece.nbytes < GATHERED_BYTES
        and before.position + before.nbytes == piece.position
        and before.sources[0].dtype == piece.sources[0].dtype
        and before.dtype == piece.dtype
        and before.sources[0].device == piece.sources[0].device
    )


def _joined(run: Sequence[Piece]) -> Piece:
    sources = [source for piece in run for source in piece.sources]
    return Piece(sources, run[0].position, sum(piece.nbytes for piece in run), run[0].dtype)


class _Streams(NamedTuple):
    """The streams of one device that are not the training's: copies don't wait for computing, nor the reverse."""

    copying: torch.cuda.Stream
    computing: torch.cuda.Stream


class CudaDeviceCopier:
    """The DeviceCopier of CUDA devices, into registered host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, _Streams] = {}
        self._unpin: weakref.WeakKeyDictionary[native.Writer, Callable[[], object]] = weakref.WeakKeyDictionary()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def require_running(self) -> None:
        if CUDA_MARKS.is_recording():
            raise UnsupportedError(
                "a CUDA graph is being captured on the training's stream: its kernels have not run, so there is no "
                "state to read; take the snapshot before or after torch.cuda.graph(...)"
            )

    def pin(self, writer: native.Writer) -> None:
        if writer in self._unpin:
            return
        address, nbytes = writer.staging
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(address, nbytes, _FOR_EVERY_DEVICE))
        if code != 0:
            raise SetupError(
                f"the {nbytes} bytes of staging memory can't be pinned (CUDA error {code}): give a smaller budget_bytes"
            )
        # The finalizer unpins also a writer that was never closed, before its memory is unmapped. It can't run while
        # copies are on their way, because they hold the writer.
        self._unpin[writer] = weakref.finalize(writer, runtime.cudaHostUnregister, address)

    def unpin(self, writer: native.Writer) -> None:
        if writer in self._unpin:
            self._unpin.pop(writer)()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        # From torch's cache of pinned memory: to pin anew each time would cost more than the copy.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        for device in {tensor.device for tensor in tensors}:
            if device not in self._streams:
                self._streams[device] = _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            for stream in self._streams[device]:
                stream.wait_stream(torch.cuda.current_stream(device))

    def enter_thread(self, device: torch.device) -> None:
        # A new thread stands on device 0, where a rank that trains on another device must not open a context.
        torch.cuda.set_device(device)

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> Transfer:
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.sources[0].device, []).append(piece)
        with contextlib.ExitStack() as stack:
            events = []
            for device, group in by_device.items():
                stack.callback(self._streams[device].copying.synchronize)
                events.append(self._on(self._streams[device].copying, group, slot))
            stack.pop_all()
        return _Events(events)

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[device].computing)

    def _on(self, stream: torch.cuda.Stream, pieces: Sequence[Piece], slot: torch.Tensor) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for piece in pieces:
                # What is gathered is memory of this stream: when it is freed here, only later work of this stream can
                # get it. The sources are the training's, and its caller holds them.
                slot[piece.position : piece.position + piece.nbytes].copy_(piece.joined(), non_blocking=True)
            event.record(stream)
        return event


CUDA = CudaDeviceCopier()
"""Touches no device before a CUDA tensor is captured."""


class _Events:
    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
