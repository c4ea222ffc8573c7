"""Compares checkpoints with what the redo log makes of the checkpoint before each: all bytes, of all tensors."""

from collections.abc import Iterator
from itertools import pairwise

import torch

import native
from capture.redo.rebuild import rebuilt_step
from capture.redo.steps import RedoRef
from capture.state.dtypes import dtype_name
from catalog.errors import MismatchError
from catalog.history import History
from catalog.read.fragments import StoredTensor, stored_tensors
from catalog.read.redo import redo_base
from catalog.records import CheckpointRef

__all__ = ["compare_key_frame", "key_frames"]


def key_frames(history: History, run: str) -> Iterator[RedoRef]:
    """Yield the checkpoints of a run that its redo log reaches, each with the checkpoint before it."""
    for before, step in pairwise(history.steps(run)):
        if redo_base(history.paths, run, step) is not None:
            yield RedoRef(CheckpointRef(run, step), CheckpointRef(run, before))


def compare_key_frame(history: History, frame: RedoRef) -> int:
    """Make a checkpoint again from the one before it; return how many tensors were made, all of which have its bits.

    MismatchError names the step and the tensor that differs; other errors are those of `rebuilt_step`.
    """
    made = rebuilt_step(history, frame)
    captured = stored_tensors(history.state_extents(frame.ref))
    for extent, elements in made.held.items():
        stored = captured.get((extent.kind, extent.name))
        if stored is None or [one.checksum for one in stored.fragments] != _checksums(elements, stored):
            raise MismatchError(
                f"step {frame.ref.step} of run {frame.ref.run}, made again from {frame.base}, is not what was "
                f"captured: {extent.kind} {extent.name!r} " + ("is not in it" if stored is None else "has other bits")
            )
    return len(made.held)


def _checksums(elements: torch.Tensor, stored: StoredTensor) -> list[bytes]:
    """Return what the checksums of the fragments would be, if they had these elements."""
    if (elements.numel(), dtype_name(elements.dtype, what=stored.name)) != (stored.numel, stored.dtype):
        return []
    parts = (elements[one.start : one.start + one.numel] for one in stored.fragments)
    return [native.checksum(part.view(torch.uint8).numpy()) for part in parts]
