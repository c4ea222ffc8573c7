"""Extents on their way to memory that the disk can't fill itself: a device's, parts of an extent, other dense orders.

They pass in batches through two host buffers that take turns. While a device copies from one of them, the other is
read into; a buffer is overwritten, or freed, only when the device has copied all of it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import torch

from capture.devices.marks import Mark, Marks, behind
from capture.load.assignments import Assignment
from capture.state.dtypes import torch_dtype
from capture.state.row_major import row_major
from catalog.data_files.pieces import piece_of
from catalog.data_files.stored_bytes import Buffer, ReadBuffer, place_batches, read_verified
from catalog.records import Extent

__all__ = ["copy_elements", "fill_through_host"]

BATCH_BYTES = 64 << 20
"""The size of each of the two buffers; one grows to the largest extent, whose checksum is that of all its bytes, and to
what is rounded from it."""


def fill_through_host(
    root: Path, assignments: Sequence[Assignment], kept: Mapping[Extent, Buffer], *, marks: Marks
) -> None:
    """Fill the destinations, with what is `kept` of an extent, or from the disk. When this returns no copy is under
    way. CorruptError when bytes differ from their checksums; the destinations are then partly overwritten.

    Takes twice BATCH_BYTES of host memory, or twice the largest extent and what is rounded of it; it is pinned when one
    is on a CUDA device.
    """
    of_extent: dict[Extent, list[Assignment]] = defaultdict(list)
    for assignment in assignments:
        of_extent[assignment.extent].append(assignment)
    pinned = any(assignment.destination.device.type == "cuda" for assignment in assignments)
    buffers = [_HostBuffer(pinned=pinned) for _ in range(2)]
    turns = cycle(buffers)
    try:
        for batch in place_batches(of_extent, most_bytes=BATCH_BYTES):
            next(turns).fill(root, {extent: of_extent[extent] for extent in batch}, kept, marks)
    finally:
        for buffer in buffers:
            buffer.wait()


class _HostBuffer:
    def __init__(self, *, pinned: bool) -> None:
        self._memory = ReadBuffer(_pinned) if pinned else ReadBuffer()
        self._copied: list[Mark] = []

    def wait(self) -> None:
        """Return once nothing is copied from the buffer any more."""
        for mark in self._copied:
            mark.wait()
        self._copied = []

    def fill(
        self, root: Path, batch: Mapping[Extent, list[Assignment]], kept: Mapping[Extent, Buffer], marks: Marks
    ) -> None:
        """Read the extents of a batch, and begin to copy them to where they belong."""
        self.wait()
        contents, addresses = self._memory.place([piece_of(extent) for extent in batch])
        read_verified(root, [each for each in zip(batch, addresses, strict=True) if each[0] not in kept])
        try:
            with torch.no_grad():
                for content, (extent, assignments) in zip(contents, batch.items(), strict=True):
                    if extent in kept:
                        content[:] = kept[extent]
                    for assignment in assignments:
                        copy_elements(assignment, content)
        finally:
            destinations = [assignment.destination for each in batch.values() for assignment in each]
            self._copied = behind(destinations, marks)


def copy_elements(assignment: Assignment, content: Buffer) -> None:
    """Copy the assigned elements out of the bytes of their whole extent; a device may do so after this returns."""
    elements = torch.from_numpy(content).view(torch_dtype(assignment.extent.dtype))
    part = elements[assignment.skip : assignment.skip + assignment.numel]
    for view in row_major(assignment.destination, assignment.at, assignment.at + assignment.numel):
        view.copy_(part[: view.numel()].view(view.shape), non_blocking=True)
        part = part[view.numel() :]


def _pinned(nbytes: int) -> Buffer:
    memory: Buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory
