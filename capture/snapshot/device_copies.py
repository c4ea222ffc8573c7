"""From device memory to host memory: copies that run beside the training, ordered with it by events.

Host tensors need none of this: they are written from where they are. The bytes of device tensors go into slots of the
writer's own staging budget, block by block, in the background (`device_feed`):
  1. At the step, on the training thread, tensors that the next forward changes are cloned on the device; then
     `DeviceCopier.begin`.
  2. In the background, `DeviceCopier.copy` into slot after slot; work that comes after `begin` on the training's stream
     may run beside it.
  3. The barrier waits until the last copy has ended, before the next update may be given to the device.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import native
from catalog.errors import SetupError, UnsupportedError

__all__ = ["CUDA", "GATHERED_BYTES", "CudaDeviceCopier", "DeviceCopier", "Mirror", "Piece", "Transfer", "coalesced"]

GATHERED_BYTES = 64 << 10
"""Smaller pieces are gathered on the device first: a copy of its own costs more than its bytes."""

_FOR_EVERY_DEVICE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A contiguous host copy of `source`, a host tensor that is not dense, to be made anew at every snapshot."""

    host: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes (a dense uint8 vector) of a device tensor, and their position in the slot."""

    source: torch.Tensor
    position: int


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
        """Make the staging memory of `writer` fit for copies. Idempotent. SetupError when the device refuses,
        UnsupportedError while work is only recorded and not done, as in the capture of a CUDA graph.
        """

    def unpin(self, writer: native.Writer) -> None:
        """Undo `pin`, before the writer is closed; no copy may be on its way. Idempotent."""

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make every `copy` from now on see these tensors as all work given to the device so far leaves them. For the
        training thread; returns at once.
        """

    def enter_thread(self, device: torch.device) -> None:
        """Prepare the calling thread, which is new, for `copy` from `device`."""

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> Transfer:
        """Begin to copy into `slot`, uint8 host memory of the writer that was pinned. From any thread that has entered;
        returns at once. After an error nothing writes into the slot any more.
        """


def coalesced(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same bytes in fewer pieces: small neighbours in the slot are gathered into one on their device."""
    runs: list[list[Piece]] = []
    end = -1
    for piece in pieces:
        small = piece.source.numel() < GATHERED_BYTES
        if small and piece.position == end:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        end = piece.position + piece.source.numel() if small else -1
    return [
        run[0] if len(run) == 1 else Piece(torch.cat([piece.source for piece in run]), run[0].position) for run in runs
    ]


class CudaDeviceCopier:
    """The DeviceCopier of CUDA devices: one copy stream for each, into registered host memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._unpin: weakref.WeakKeyDictionary[native.Writer, Callable[[], object]] = weakref.WeakKeyDictionary()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def pin(self, writer: native.Writer) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph is being captured on the training's stream: its kernels have not run, so there is no "
                "state to read; take the snapshot before or after torch.cuda.graph(...)"
            )
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

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        for device in {tensor.device for tensor in tensors}:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def enter_thread(self, device: torch.device) -> None:
        # A new thread stands on device 0, where a rank that trains on another device must not open a context.
        torch.cuda.set_device(device)

    def copy(self, pieces: Sequence[Piece], slot: torch.Tensor) -> Transfer:
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.source.device, []).append(piece)
        with contextlib.ExitStack() as stack:
            events = []
            for device, group in by_device.items():
                stack.callback(self._streams[device].synchronize)
                events.append(self._on(self._streams[device], group, slot))
            stack.pop_all()
        return _Events(events)

    def _on(self, stream: torch.cuda.Stream, pieces: Sequence[Piece], slot: torch.Tensor) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for piece in coalesced(pieces):
                slot[piece.position : piece.position + piece.source.numel()].copy_(piece.source, non_blocking=True)
            for piece in pieces:
                # Memory that the training frees meanwhile is not reused before this stream is past the copy.
                piece.source.record_stream(stream)
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
