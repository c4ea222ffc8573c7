"""Finds tensors that were written to, or freed, while a snapshot was reading them.

Nothing may write the memory that a snapshot reads until the barrier. torch counts in-place writes in a tensor's version
counter; it does not count writes through `.data`, which only a hash at the step and another one later can find.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch

import native
from capture.snapshot.parts import Part
from capture.state.interface import TensorItem

__all__ = ["ChangeDetector", "Check"]

Check = Literal["versions", "hash"]


class ChangeDetector:
    """Remembers the address and version of every tensor, for `changed` to compare. `hashed` are parts whose bytes are
    hashed as well: one pass over all that the host can read here, and another one in `changed`.
    """

    def __init__(self, items: Sequence[TensorItem], *, hashed: Sequence[Part] = ()) -> None:
        self._items = items
        self._marks = [_mark(item) for item in items]
        self._hashed = hashed
        self._digests = [_digest(part) for part in hashed]

    def changed(self) -> list[str]:
        """Return the tensors that were written to, or freed, since this was made."""
        now = [_mark(item) for item in self._items]
        if now != self._marks:
            triples = zip(self._items, self._marks, now, strict=True)
            return [_label(item) for item, before, mark in triples if mark != before]
        pairs = zip(self._hashed, self._digests, strict=True)
        return [_label(part.item) for part, digest in pairs if _digest(part) != digest]


def _mark(item: TensorItem) -> tuple[int, int, int]:
    # Freed memory has another address. A write through a DTensor is counted there, one to its local memory is not.
    return item.tensor.data_ptr(), _version(item.tensor), -1 if item.dtensor is None else _version(item.dtensor)


def _version(tensor: torch.Tensor) -> int:
    # Tensors made in inference mode have none.
    return -1 if tensor.is_inference() else tensor._version


def _digest(part: Part) -> bytes:
    if part.device is not None:
        return b""
    return native.checksum((ctypes.c_char * part.nbytes).from_address(part.address))


def _label(item: TensorItem) -> str:
    return f"{item.kind} {item.name!r}"
