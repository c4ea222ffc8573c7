"""From device memory to host memory: copies that run beside the training, ordered with it by events.

Host tensors need none of this, they are written from where they are. A device tensor is copied into a pinned host mirror that belongs to the plan:
  1. At the step, the copy stream is made to wait for what the training stream has been given so far, and gets the copies: `CopyEngine.copy`.
     Eager tensors, which the next forward changes, are copied on the training stream itself, so ahead of that forward.
  2. The file is begun when the copies have arrived, in the background, or at the barrier when that comes first.
  3. The barrier waits for the copies before the next update may be given to the device.
A mirror is used again only after the barrier of the snapshot before, when the writer needs no byte of it any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["CUDA", "Arrived", "Copies", "CopyEngine", "CudaCopyEngine", "Mirror"]


@dataclass(frozen=True, slots=True, eq=False)
class Mirror:
    """A contiguous host copy of `source`, to be made anew at every snapshot."""

    host: torch.Tensor
    source: torch.Tensor
    eager: bool


class Copies(Protocol):
    """Copies on their way."""

    def wait(self) -> None:
        """Return once all have arrived: the hosts may be read, the sources may be overwritten. Idempotent, from any thread."""


class CopyEngine(Protocol):
    """Copies device tensors while the training computes. The surface is just this so that its users' order can be tested without a device."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` must be copied by this engine, for nobody else can read its memory."""

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Contiguous host memory of the same shape and dtype, fit to be a mirror."""

    def copy(self, mirrors: Sequence[Mirror]) -> Copies:
        """Begin to copy the sources as all work given to the device so far leaves them; returns at once. Eager sources are
        taken before any work that is given to the device later; the others at any time until `Copies.wait` returns.
        """


class Arrived:
    """No copies, or none that are left to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class CudaCopyEngine:
    """The CopyEngine of CUDA devices: one copy stream for each, pinned memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy(self, mirrors: Sequence[Mirror]) -> Copies:
        by_device: dict[torch.device, list[Mirror]] = {}
        for mirror in mirrors:
            by_device.setdefault(mirror.source.device, []).append(mirror)
        return _Events([event for device, group in by_device.items() for event in self._on(device, group)])

    def _on(self, device: torch.device, mirrors: Sequence[Mirror]) -> list[torch.cuda.Event]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        training = torch.cuda.current_stream(device)
        stream.wait_stream(training)
        with torch.cuda.device(device):
            for mirror in mirrors:
                if mirror.eager:
                    mirror.host.copy_(mirror.source, non_blocking=True)
            events = [training.record_event()]
            with torch.cuda.stream(stream):
                for mirror in mirrors:
                    if not mirror.eager:
                        mirror.host.copy_(mirror.source, non_blocking=True)
                        # Memory that the training gives up meanwhile is not handed out again before this stream is past it.
                        mirror.source.record_stream(stream)
                events.append(stream.record_event())
        return events


CUDA = CudaCopyEngine()
"""Touches no device before a CUDA tensor is captured."""


class _Events:
    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
