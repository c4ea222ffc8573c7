"""State of a device, and whatever the disk can't fill itself, passes through two buffers in host memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from late_marks import LateMarks

import native
from capture.load import staging
from capture.load.assignments import Assignment
from capture.load.read_into import read_into
from catalog.errors import CorruptError
from catalog.records import Extent

ELEMENTS = 1000


class LateTensor(torch.Tensor):
    """A tensor of a simulated device: what is copied into it is read from its source when a mark makes it."""

    marks: LateMarks

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            into, source = args[0].as_subclass(torch.Tensor), args[1]
            args[0].marks.give(lambda: into.copy_(source))
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, LateTensor):
            result.marks = args[0].marks
        return result


def late(marks: LateMarks, tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.as_subclass(LateTensor)
    result.marks = marks
    return result


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[Extent]]:
    """Ten extents of 1000 elements each, one behind the other in a file."""
    values = np.random.default_rng(3).standard_normal((10, ELEMENTS)).astype(np.float32)
    (tmp_path / "data").write_bytes(values.tobytes())
    return tmp_path, [
        Extent(
            name=f"t{i}",
            kind="model",
            dtype="F32",
            shape=(ELEMENTS,),
            start=0,
            numel=ELEMENTS,
            file="data",
            offset=4 * ELEMENTS * i,
            nbytes=4 * ELEMENTS,
            checksum=native.checksum(row),
            placement="replicated",
        )
        for i, row in enumerate(values)
    ]


def content(root: Path, extent: Extent) -> torch.Tensor:
    data = (root / extent.file).read_bytes()[extent.offset : extent.offset + extent.nbytes]
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def test_a_buffer_is_read_into_only_when_it_is_copied(stored, monkeypatch):
    """Every batch takes two extents, and five batches share two buffers; the device copies as late as it may."""
    root, extents = stored
    monkeypatch.setattr(staging, "BATCH_BYTES", 2 * extents[0].nbytes)
    marks = LateMarks()
    targets = [late(marks, torch.zeros(ELEMENTS)) for _ in extents]
    pairs = zip(extents, targets, strict=True)
    read_into(root, [Assignment(extent, target, 0, 0, ELEMENTS) for extent, target in pairs], marks=marks)
    for extent, target in zip(extents, targets, strict=True):
        assert torch.equal(target.as_subclass(torch.Tensor), content(root, extent)), extent.name


def test_a_damaged_extent_leaves_no_copy_under_way(stored, monkeypatch):
    root, extents = stored
    monkeypatch.setattr(staging, "BATCH_BYTES", extents[0].nbytes)
    with (root / "data").open("r+b") as file:
        file.seek(extents[4].offset)
        file.write(b"????")
    marks = LateMarks()
    targets = [late(marks, torch.zeros(ELEMENTS)) for _ in extents]
    pairs = zip(extents, targets, strict=True)
    with pytest.raises(CorruptError, match="t4"):
        read_into(root, [Assignment(extent, target, 0, 0, ELEMENTS) for extent, target in pairs], marks=marks)
    for extent, target in list(zip(extents, targets, strict=True))[:4]:
        assert torch.equal(target.as_subclass(torch.Tensor), content(root, extent)), extent.name


@pytest.mark.parametrize("order", ["rows", "columns", "gaps"])
def test_parts_of_extents_fill_tensors_of_any_layout(stored, order):
    """Two extents, cut in their middle, fill one tensor whose rows they don't meet."""
    root, extents = stored
    target = {
        "rows": lambda: torch.zeros(30, 33),
        "columns": lambda: torch.zeros(33, 30).t(),
        "gaps": lambda: torch.zeros(30, 66)[:, ::2],
    }[order]()
    first, second = extents[0], extents[1]
    read_into(root, [Assignment(first, target, 0, 505, 495), Assignment(second, target, 495, 0, 495)])
    expected = torch.cat([content(root, first)[505:], content(root, second)[:495]])
    assert torch.equal(target.reshape(-1), expected)
