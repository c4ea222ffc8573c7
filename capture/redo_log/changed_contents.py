"""Copies the buffers and objects of a training that have changed, for a redo log: readers keep the others.

What has changed since a checkpoint is bounded, because readers bound what they take for it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

import native
from capture.data_file.data_file import PlacedObject
from capture.state.dtypes import dtype_name
from capture.state.objects import inlined
from capture.state.providers import Buffers
from catalog.errors import UnsupportedError
from catalog.format.redo_segment import RedoTensor
from catalog.read.redo_allowance import MOST_MORE_BYTES

__all__ = ["ChangedContents", "Recorded"]

_MOST_OBJECT_BYTES: Final = 4 << 20
_NO_BYTES: Final = torch.empty(0, dtype=torch.uint8)

Recorded = list[tuple[RedoTensor, torch.Tensor]]
"""Tensors of a redo log, each with its content in host memory, which nobody else writes."""


class ChangedContents:
    """Knows what readers of the log have of the buffers of `module` and of its training's objects: first the buffers as
    they are now, and then what was recorded."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._buffers = Buffers(module)
        self._buffer_hashes = {name: _checksum(buffer) for name, buffer in self._buffers.live()}
        self._object_hashes: dict[str, bytes] = {}
        self._recorded_bytes: dict[tuple[str, str], int] = {}
        self._captured_bytes = self._buffer_bytes()

    def captured(self) -> None:
        """A checkpoint has begun, which has all of them: what is recorded from now on is bounded anew."""
        self._captured_bytes = self._buffer_bytes()
        self._recorded_bytes.clear()

    def forget(self) -> None:
        """Record all buffers and objects with the next step: readers do not have those of this one, or another's."""
        self._buffer_hashes.clear()
        self._object_hashes.clear()

    def changed_buffers(self) -> Recorded:
        """Return copies of the buffers that have changed. UnsupportedError when they are more than readers take, or
        when one is not there any more, which the log can't say."""
        live = list(self._buffers.live())
        gone = sorted(self._buffer_hashes.keys() - {name for name, _ in live})
        if gone:
            raise UnsupportedError(f"the buffer {gone[0]!r} is not there any more, which can't be recorded")
        changed = []
        for name, buffer in live:
            digest = _checksum(buffer)
            if self._buffer_hashes.get(name) != digest:
                self._buffer_hashes[name] = digest
                changed.append((name, buffer))
        self._require_room({("buffer", name): buffer.nbytes for name, buffer in changed})
        found = []
        for name, buffer in changed:
            dtype = dtype_name(buffer.dtype, what=f"buffer {name!r}")
            copy = buffer.detach().to("cpu", copy=True).contiguous()
            found.append((RedoTensor("buffer", name, dtype, tuple(buffer.shape)), copy))
        return found

    def changed_objects(self, objects: Sequence[PlacedObject]) -> Recorded:
        """Return the texts of those of all objects that have changed, and of each that is too large nothing.
        UnsupportedError as for buffers."""
        found = []
        for encoded in (inlined(placed.encoded) for placed in objects):
            # Of a large object most is still in its own memory, which goes on changing.
            text = b"" if encoded.live or len(encoded.json) > _MOST_OBJECT_BYTES else encoded.json
            digest = native.checksum(text)
            # One that is too large is named with every step, so that none takes an older one for it.
            if not text or self._object_hashes.get(encoded.name) != digest:
                self._object_hashes[encoded.name] = digest
                content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else _NO_BYTES
                found.append((RedoTensor("object", encoded.name, "U8", (len(text),)), content))
        self._require_room({("object", tensor.name): content.nbytes for tensor, content in found})
        return found

    def _buffer_bytes(self) -> int:
        return sum(buffer.nbytes for _, buffer in self._buffers.live())

    def _require_room(self, more: Mapping[tuple[str, str], int]) -> None:
        """Raise UnsupportedError when what has changed since the last checkpoint is more than readers take."""
        found = {**self._recorded_bytes, **more}
        total, most = sum(found.values()), self._captured_bytes + MOST_MORE_BYTES
        if total > most:
            raise UnsupportedError(
                f"buffers and objects that have changed since the last checkpoint take {total} bytes, where {most} can "
                "be recorded: capture more often, or make them smaller"
            )
        self._recorded_bytes = found


def _checksum(buffer: torch.Tensor) -> bytes:
    content = buffer.detach().to("cpu").contiguous()
    return native.checksum(content.view(-1).view(torch.uint8).numpy() if content.numel() else b"")
