"""Marks in the work that is given to a device: whoever reads a value later reads it behind its mark.

A tensor that the training hands over may not be computed yet, and the stream that will compute it is not the one on
which another thread, or a later line of the training, reads it. Nothing orders the two but an event.
"""

from collections.abc import Iterable
from typing import Protocol

import torch

__all__ = ["CUDA_MARKS", "Mark", "Marks", "behind"]


class Mark(Protocol):
    """A point in the work of one stream of a device."""

    def wait(self) -> None:
        """Return once the device has done all work before the mark. From any thread."""

    def precede(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make whatever the calling thread gives to the device from now on come after the mark. The memory of the
        `tensors`, which it may read, is not used for others before it has.
        """


class Marks(Protocol):
    """Sets marks. The surface is this small so that the order of reads can be tested without a device."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether work on `tensor` may be done later than it is given, on a device that this knows."""

    def is_recording(self) -> bool:
        """True while the calling thread's work is only recorded and not done, as in the capture of a CUDA graph: then
        a tensor has no value, and no mark may be set.
        """

    def mark(self, device: torch.device) -> Mark:
        """Return a mark behind all work that the calling thread has given to its current stream of `device`."""


def behind(values: Iterable[object], marks: Marks) -> list[Mark]:
    """Return a mark for each device that has tensors among `values`, behind all that computes them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and marks.owns(value)]
    return [marks.mark(device) for device in dict.fromkeys(tensor.device for tensor in tensors)]


class _CudaMarks:
    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def is_recording(self) -> bool:
        # Asking a CUDA that is not in use yet would begin to use it.
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

    def mark(self, device: torch.device) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return _CudaMark(device, event)


class _CudaMark:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def precede(self, tensors: Iterable[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(stream)


CUDA_MARKS: Marks = _CudaMarks()
"""Touches no device before a CUDA tensor is handed over."""
