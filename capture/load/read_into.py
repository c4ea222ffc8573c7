"""Reads extents into live tensors, verified: directly where a whole extent fits, else through host memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from capture.devices.marks import CUDA_MARKS, Marks
from capture.load.assignments import Assignment
from capture.load.staging import copy_elements, fill_through_host
from capture.state.dtypes import torch_dtype
from catalog.data_files.pieces import Piece, piece_of
from catalog.data_files.stored_bytes import Buffer, read_unverified, read_verified
from catalog.records import Extent

__all__ = ["read_extents", "read_into", "read_part"]


def read_into(
    root: Path,
    assignments: Sequence[Assignment],
    kept: Mapping[Extent, Buffer] = MappingProxyType({}),
    *,
    marks: Marks = CUDA_MARKS,
) -> None:
    """Fill every destination. CorruptError when bytes differ from their checksums; the destinations are then partly
    overwritten.

    kept: the verified bytes of extents that were read before; these are not read again
    """
    reads: list[tuple[Extent, int]] = []
    in_memory: list[Assignment] = []
    through_host: list[Assignment] = []
    direct: set[Piece] = set()
    for assignment in assignments:
        extent, destination = assignment.extent, assignment.destination
        if not extent.nbytes:
            continue
        place = piece_of(extent)
        in_host = destination.device.type == "cpu" and not marks.owns(destination)
        if in_host and extent in kept:
            in_memory.append(assignment)
        # One call reads each place of a file once.
        elif in_host and destination.is_contiguous() and assignment.numel == extent.numel and place not in direct:
            direct.add(place)
            reads.append((extent, destination.data_ptr() + assignment.at * destination.element_size()))
        else:
            through_host.append(assignment)
    read_verified(root, reads)
    with torch.no_grad():
        for assignment in in_memory:
            copy_elements(assignment, kept[assignment.extent])
    fill_through_host(root, through_host, kept, marks=marks)


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
