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
from catalog.read.fragments import StoredTensor, rank_of, stored_tensors
from catalog.read.redo import redo_base
from catalog.records import CheckpointRef

__all__ = ["compare_key_frame", "key_frames"]


def key_frames(history: History, run: str) -> Iterator[RedoRef]:
    """Yield the checkpoints of a run that its redo log reaches, each with the checkpoint before it."""
    for before, step in pairwise(history.steps(run)):
        if redo_base(history.paths, run, step) is not None:
            yield RedoRef(CheckpointRef(run, step), CheckpointRef(run, before))


def compare_key_frame(history: History, frame: RedoRef) -> int:
    """Make a checkpoint again from the one before it; return how many tensors were made. They have its bits, and so
    have all that no update makes.

    MismatchError names the step and the tensor that differs; other errors are those of `rebuilt_step`.
    """
    made = rebuilt_step(history, frame)
    extents = history.state_extents(frame.ref)
    captured = stored_tensors(extents)
    own = {(rank_of(one), one.kind, one.name): one for one in extents if one.placement == "rank_local"}
    not_made = [extent for extent in made.extents if extent not in made.held]
    kept = stored_tensors(extent for extent in not_made if extent.placement != "rank_local")
    same = {key: one.same_bytes(captured[key]) for key, one in kept.items() if key in captured}
    for extent in not_made:
        of_rank = own.get((rank_of(extent), extent.kind, extent.name))
        if of_rank is not None and extent.placement == "rank_local":
            key = extent.kind, extent.name
            same[key] = same.get(key, True) and of_rank.checksum == extent.checksum
    for extent, elements in made.held.items():
        key = extent.kind, extent.name
        of_rank = own.get((rank_of(extent), *key))
        stored = captured.get(key) if of_rank is None else stored_tensors([of_rank])[key]
        is_same = stored is not None and [one.checksum for one in stored.fragments] == _checksums(elements, stored)
        same[key] = same.get(key, True) and is_same
    for (kind, name), is_same in same.items():
        if not is_same:
            raise MismatchError(
                f"step {frame.ref.step} of run {frame.ref.run}, made again from {frame.base}, is not what was "
                f"captured: {kind} {name!r} " + ("has other bits" if (kind, name) in captured else "is not in it")
            )
    return len(made.held)


def _checksums(elements: torch.Tensor, stored: StoredTensor) -> list[bytes]:
    """Return what the checksums of the fragments would be, if they had these elements."""
    if (elements.numel(), dtype_name(elements.dtype, what=stored.name)) != (stored.numel, stored.dtype):
        return []
    parts = (elements[one.start : one.start + one.numel] for one in stored.fragments)
    return [native.checksum(part.view(torch.uint8).numpy()) for part in parts]
