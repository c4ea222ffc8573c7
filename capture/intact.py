"""Whether the memory that a snapshot reads while the training goes on stayed as it was, and if not, which tensor did not.

What a snapshot may read until the barrier nobody may write. torch counts in-place writes in a tensor's version; writes
through `.data` it does not count, those only a hash at the step and another one later find.
"""

import ctypes
from typing import Literal

import torch

import native
from capture.plan import Part, Plan

__all__ = ["Check", "Witness"]

Check = Literal["versions", "hash"]


class Witness:
    """What the live memory of `plan` looked like at the step. With check="hash" that is a pass over all of it that the host
    can read, and `moved` is another one.
    """

    def __init__(self, plan: Plan, *, check: Check) -> None:
        self._parts = plan.live_parts
        self._marks = [_mark(part.item.tensor) for part in self._parts]
        self._digests = [_digest(part) for part in self._parts] if check == "hash" else None

    def moved(self) -> list[str]:
        """The tensors that were written to, or freed, since the step."""
        now = [_mark(part.item.tensor) for part in self._parts]
        if now != self._marks:
            pairs = zip(self._parts, self._marks, now, strict=True)
            return [_label(part) for part, before, mark in pairs if mark != before]
        if self._digests is None:
            return []
        return [
            _label(part) for part, digest in zip(self._parts, self._digests, strict=True) if _digest(part) != digest
        ]


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    # Tensors made in inference mode have no version; freed memory has another address.
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _digest(part: Part) -> bytes:
    if part.device is not None:
        return b""
    return native.checksum((ctypes.c_char * part.nbytes).from_address(part.address))


def _label(part: Part) -> str:
    return f"{part.item.kind} {part.item.name!r}"
