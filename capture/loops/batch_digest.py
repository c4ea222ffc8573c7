"""The digest of what a step was trained on: every tensor that the training forwards of the step were given.

It names a batch, so that a cause can, and a replay that was given another one. It is a function of the content alone:
the same batch has the same digest at every step, on every rank and in every run of the same kind of device. Nothing
here waits for a device.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from capture.devices.digests import DeviceDigests, Reading, words_of
from capture.devices.marks import CUDA_MARKS, Marks
from native import checksum

__all__ = ["BatchDigest", "BatchDigests"]

_WHOLE_BYTES: Final = 1 << 20
"""A larger tensor is read in part: every second, fourth, ... slice of its largest dimensions, until so much is left."""
_DIGEST_BYTES: Final = 8
_MOST_TENSORS: Final = 4096
"""So many tensors of a step are told apart; further ones, of very many micro-batches, are left out."""
_MOST_NESTING: Final = 8


class BatchDigest:
    """The digest of one step's batch; a device may still compute its part. It holds no memory of the batch's."""

    def __init__(self, parts: Sequence[tuple[bytes, bytes | Reading]]) -> None:
        self._parts = parts

    @property
    def reader(self) -> str:
        """Tell what has read the batch, "host" or "device": the digests of two kinds are not comparable."""
        return "device" if any(isinstance(content, Reading) for _, content in self._parts) else "host"

    def hex(self) -> str:
        """Wait for the devices, and return 16 hexadecimal digits. From any thread. RuntimeError when a device could not
        compute its part.
        """
        found = [
            head + (content if isinstance(content, bytes) else b"".join(map(checksum, content.digests())))
            for head, content in self._parts
        ]
        return checksum(b"".join(map(checksum, found)))[:_DIGEST_BYTES].hex()


class BatchDigests:
    """Collects what the forwards of a step are given, for the training thread."""

    def __init__(self, marks: Marks = CUDA_MARKS) -> None:
        self._marks = marks
        self._parts: list[tuple[bytes, bytes | Reading]] = []

    def saw_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the arguments of a training forward: their tensors, also those within lists, tuples and mappings. Those
        without a content of their own, as while torch traces or records, are left out.
        """
        if torch.compiler.is_compiling() or self._marks.is_recording():
            return
        for name, tensor in _tensors("", (args, kwargs), _MOST_NESTING):
            if len(self._parts) >= _MOST_TENSORS:
                return
            # Forwards are given tensors of kinds that nobody has thought of; no digest may end a training.
            with contextlib.suppress(Exception):
                head = f"{name} {tensor.dtype} {list(tensor.shape)}:".encode()
                self._parts.append((head, self._content(_sampled(tensor.detach()))))

    def take(self) -> BatchDigest | None:
        """Return the digest of what was seen since the last call, None if nothing was."""
        parts, self._parts = self._parts, []
        return BatchDigest(parts) if parts else None

    def _content(self, tensor: torch.Tensor) -> bytes | Reading:
        if not self._marks.owns(tensor):
            return checksum(tensor.view(-1).view(torch.uint8).numpy())
        # The words of a tensor depend on where it begins; those of a copy do not.
        words = words_of(tensor.clone() if tensor.storage_offset() else tensor)
        assert words is not None, "a contiguous tensor is a vector of words"
        return DeviceDigests([words]).read()


def _tensors(name: str, value: Any, nesting: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an argument that have a content, each with where it lies."""
    if isinstance(value, torch.Tensor):
        if _has_content(value):
            yield name, value
    elif nesting and isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(f"{name}/{key}", one, nesting - 1)
    elif nesting and isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _tensors(f"{name}/{index}", one, nesting - 1)


def _has_content(tensor: torch.Tensor) -> bool:
    # Subclasses stand for other tensors, on other ranks or in a trace.
    plain = type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    readable = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
    readable = readable and not (tensor.is_quantized or tensor.is_nested)
    return plain and readable and tensor.numel() > 0


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or of a large one evenly spaced slices, contiguous and without lazy conjugation or sign."""
    while tensor.nbytes > _WHOLE_BYTES:
        largest = max(range(tensor.dim()), key=lambda at: tensor.shape[at])
        tensor = tensor[(slice(None),) * largest + (slice(None, None, 2),)]
    return tensor.resolve_conj().resolve_neg().contiguous()
