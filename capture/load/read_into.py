"""Reads extents into live tensors, verified: directly where a whole extent fits, else through host memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from capture.load.assignments import Assignment
from capture.state.dtypes import torch_dtype
from catalog.read.stored_bytes import Buffer, read_unverified, read_verified
from catalog.records import Extent

__all__ = ["read_extents", "read_into", "read_part"]


def read_into(
    root: Path, assignments: Sequence[Assignment], kept: Mapping[Extent, Buffer] = MappingProxyType({})
) -> None:
    """Fill every destination. CorruptError when bytes differ from their checksums; the destinations are then partly
    overwritten.

    kept: the verified bytes of extents that were read before; these are not read again
    """
    reads: list[tuple[Extent, int]] = []
    staged: dict[Extent, torch.Tensor] = {}
    copies: list[tuple[Assignment, torch.Tensor]] = []
    direct: set[tuple[str, int]] = set()
    for assignment in assignments:
        extent, destination = assignment.extent, assignment.destination
        if not extent.nbytes:
            continue
        if extent in kept:
            copies.append((assignment, torch.from_numpy(kept[extent]).view(torch_dtype(extent.dtype))))
            continue
        place = (extent.file, extent.offset)
        fits = destination.device.type == "cpu" and destination.is_contiguous() and assignment.numel == extent.numel
        if fits and place not in direct:
            direct.add(place)
            reads.append((extent, destination.data_ptr() + assignment.at * destination.element_size()))
            continue
        if extent not in staged:
            staged[extent] = torch.empty(extent.numel, dtype=torch_dtype(extent.dtype))
        copies.append((assignment, staged[extent]))
    # One call reads each place of a file once, so an extent that also goes straight to a destination needs a second
    # call.
    again: list[tuple[Extent, int]] = []
    for extent, temporary in staged.items():
        (again if (extent.file, extent.offset) in direct else reads).append((extent, temporary.data_ptr()))
    read_verified(root, reads)
    read_verified(root, again)
    with torch.no_grad():
        for assignment, temporary in copies:
            _copy_part(assignment, temporary)


def read_extents(root: Path, extents: Sequence[Extent]) -> list[torch.Tensor]:
    """Return every extent as a flat tensor in host memory, verified. CorruptError when bytes differ from their
    checksum.
    """
    tensors = [torch.empty(extent.numel, dtype=torch_dtype(extent.dtype)) for extent in extents]
    pairs = zip(extents, tensors, strict=True)
    read_verified(root, [(extent, tensor.data_ptr()) for extent, tensor in pairs if extent.nbytes])
    return tensors


def read_part(root: Path, extent: Extent, *, skip: int, numel: int) -> torch.Tensor:
    """Return elements `[skip, skip + numel)` of an extent, flat, in host memory.

    Nothing is verified: a part has no checksum of its own. CorruptError when the bytes can't be read.
    """
    tensor = torch.empty(numel, dtype=torch_dtype(extent.dtype))
    read_unverified(root, extent, tensor.data_ptr(), skip_bytes=skip * tensor.element_size(), nbytes=tensor.nbytes)
    return tensor


def _copy_part(assignment: Assignment, temporary: torch.Tensor) -> None:
    part = temporary[assignment.skip : assignment.skip + assignment.numel]
    destination = assignment.destination
    if assignment.numel == destination.numel():
        destination.copy_(part.view(destination.shape))
    elif destination.is_contiguous():
        destination.view(-1)[assignment.at : assignment.at + assignment.numel].copy_(part)
    else:
        # A part of a tensor that is not contiguous has no view: its elements are addressed by their coordinates.
        positions = np.unravel_index(np.arange(assignment.at, assignment.at + assignment.numel), destination.shape)
        destination[tuple(torch.from_numpy(axis) for axis in positions)] = part.to(destination.device)
