"""Reading assigned extents: straight into the live memory where an extent fits in whole, through a temporary elsewhere,
verified either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import native
from capture.load.assignments import Assignment
from capture.state.dtypes import torch_dtype
from catalog.errors import CorruptError, FormatError
from catalog.records import CHECKSUM_BYTES, Extent

__all__ = ["read_extents", "read_into"]


@dataclass(slots=True)
class _Batch:
    """Reads that go out in one native call."""

    root: Path
    extents: list[Extent] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def add(self, extent: Extent, address: int) -> None:
        self.extents.append(extent)
        self.addresses.append(address)

    def run(self) -> None:
        """Read everything. CorruptError names tensor, file and offset of the first extent whose bytes differ from its
        checksum.
        """
        files = sorted({extent.file for extent in self.extents})
        index = {file: i for i, file in enumerate(files)}
        try:
            digests = native.read(
                [str(self.root / file) for file in files],
                file_index=np.array([index[extent.file] for extent in self.extents], dtype=np.uint32),
                offsets=np.array([extent.offset for extent in self.extents], dtype=np.uint64),
                addresses=np.array(self.addresses, dtype=np.uint64),
                nbytes=np.array([extent.nbytes for extent in self.extents], dtype=np.uint64),
            )
        except OSError as error:
            raise CorruptError(
                f"{error.filename}: {error.strerror}: the file is damaged, truncated or missing"
            ) from error
        for i, extent in enumerate(self.extents):
            digest = digests[CHECKSUM_BYTES * i : CHECKSUM_BYTES * (i + 1)]
            if digest != extent.checksum:
                raise CorruptError(
                    f"{self.root / extent.file}: {extent.kind} {extent.name!r} at offset {extent.offset}: the manifest's checksum is "
                    f"{extent.checksum.hex()}, the bytes give {digest.hex()}: the file is damaged; restore another step"
                )


def read_into(root: Path, assignments: Sequence[Assignment]) -> None:
    """Fill every destination. CorruptError when bytes differ from their checksums; destinations are then partly
    overwritten.
    """
    batch = _Batch(root)
    staged: dict[Extent, torch.Tensor] = {}
    later: list[tuple[Assignment, torch.Tensor]] = []
    whole: set[tuple[str, int]] = set()
    for assignment in assignments:
        extent, destination = assignment.extent, assignment.destination
        place = (extent.file, extent.offset)
        direct = destination.device.type == "cpu" and destination.is_contiguous()
        if direct and assignment.numel == extent.numel and extent.nbytes and place not in whole:
            whole.add(place)
            batch.add(extent, destination.data_ptr() + assignment.at * destination.element_size())
            continue
        if extent.nbytes:
            if extent not in staged:
                staged[extent] = torch.empty(extent.numel, dtype=torch_dtype(extent.dtype))
            later.append((assignment, staged[extent]))
    # The native reader takes each place of a file once; an extent that goes to several places is read again by itself.
    again = _Batch(root)
    for extent, temporary in staged.items():
        (again if (extent.file, extent.offset) in whole else batch).add(extent, temporary.data_ptr())
    batch.run()
    again.run()
    with torch.no_grad():
        for assignment, temporary in later:
            _copy_part(assignment, temporary)


def read_extents(root: Path, extents: Sequence[Extent]) -> list[torch.Tensor]:
    """The bytes of extents as flat tensors in host memory, verified."""
    batch = _Batch(root)
    tensors = []
    for extent in extents:
        if extent.codec != "raw":
            raise FormatError(f"{root / extent.file}: field codec: {extent.codec!r} is not known to this release")
        tensor = torch.empty(extent.numel, dtype=torch_dtype(extent.dtype))
        tensors.append(tensor)
        if extent.nbytes:
            batch.add(extent, tensor.data_ptr())
    batch.run()
    return tensors


def _copy_part(assignment: Assignment, temporary: torch.Tensor) -> None:
    part = temporary[assignment.skip : assignment.skip + assignment.numel]
    destination = assignment.destination
    if assignment.numel == destination.numel():
        destination.copy_(part.view(destination.shape))
    elif destination.is_contiguous():
        destination.view(-1)[assignment.at : assignment.at + assignment.numel].copy_(part)
    else:
        positions = np.unravel_index(np.arange(assignment.at, assignment.at + assignment.numel), destination.shape)
        destination[tuple(torch.from_numpy(axis) for axis in positions)] = part.to(destination.device)
