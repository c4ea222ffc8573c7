"""Whether the memory that a snapshot reads while the training goes on stayed as it was, and if not, which tensor did not.

What a snapshot may read until the barrier nobody may write. torch counts in-place writes in a tensor's version; writes
through `.data` it does not count, those only a second hash at the barrier finds.
"""

import ctypes
from collections.abc import Iterator
from typing import Literal

import torch

import native
from capture.plan import Part, Plan

__all__ = ["Check", "Witness"]

Check = Literal["versions", "hash"]


class Witness:
    """What the live memory of `plan` looked like at the step. All methods are for the training thread but `unread` and
    `differing`.
    """

    def __init__(self, plan: Plan, *, check: Check) -> None:
        self._parts = plan.live_parts
        self._marks = [_mark(part.item.tensor) for _, part in self._parts]
        self._check = check
        self._digests: list[bytes] | None = None

    def moved(self) -> list[str]:
        """The tensors that were written to, or freed, since the step."""
        now = [_mark(part.item.tensor) for _, part in self._parts]
        if now == self._marks:
            return []
        return [
            _label(part)
            for (_, part), before, mark in zip(self._parts, self._marks, now, strict=True)
            if mark != before
        ]

    def hash_again(self) -> None:
        """With check="hash": hash what the host can read, as it is now."""
        if self._check == "hash":
            self._digests = [native.checksum(_bytes_of(part)) for _, part in self._hashed()]

    def differing(self, checksums: bytes) -> list[str]:
        """The tensors whose hash at the barrier is not the one in `checksums`, 16 bytes for each part of the plan."""
        if self._digests is None:
            return []
        return [
            _label(part)
            for (i, part), digest in zip(self._hashed(), self._digests, strict=True)
            if checksums[16 * i : 16 * i + 16] != digest
        ]

    def _hashed(self) -> Iterator[tuple[int, Part]]:
        return ((i, part) for i, part in self._parts if part.item.tensor.device.type == "cpu")


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    # Tensors made in inference mode have no version; freed memory has another address.
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _bytes_of(part: Part) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * part.nbytes).from_address(part.address)


def _label(part: Part) -> str:
    return f"{part.item.kind} {part.item.name!r}"
