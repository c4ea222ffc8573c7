"""Makes a step again that was not captured, and compares what was made with all that is known of it.

    the checkpoint before  ->  its optimizer in memory  ->  one update for each record, each compared with the step's
    fingerprint where there is one  ->  the tensors of the step

Nothing that differs is handed out: MismatchError names the step and the tensor.
"""

from collections.abc import Callable, Mapping

import torch

from capture.load.assignments import assign
from capture.load.read_into import read_into
from capture.load.rebuilt import RebuiltStep, held_extent
from capture.redo.fingerprints import first_difference
from capture.redo.steps import RedoRef
from capture.redo.updates import Key, RepeatedUpdates
from capture.state.dtypes import torch_dtype
from capture.state.update_rule import require_same_update, threads_of
from catalog.errors import MismatchError
from catalog.format.fingerprints import StepFingerprint
from catalog.history import History
from catalog.read.fingerprints import fingerprints_of
from catalog.read.fragments import StoredTensor, stored_tensors
from catalog.read.pins import pinned
from catalog.read.redo import redo_chain
from catalog.records import CheckpointRef, Extent

__all__ = ["rebuilt_step"]


def rebuilt_step(history: History, step: RedoRef) -> RebuiltStep:
    """Return a step of a redo log with its weights, buffers and optimizer state, made in host memory.

    NotFoundError for a step whose chain of records has a gap, MismatchError where something else than updates has made
    it, where an update would have other bits here, or where what is made is not what the training had; CorruptError for
    damaged files.
    """
    with pinned(history.paths, step.base):
        stored = stored_tensors(history.state_extents(step.base))
        updates = _repeated(history, step, stored)
        return _described(step, stored, updates)


def _repeated(history: History, step: RedoRef, stored: Mapping[Key, StoredTensor]) -> RepeatedUpdates:
    """Make the updates after the base of a step, whose tensors are `stored`, up to the step."""
    base, until = step.base, step.ref.step
    chain = redo_chain(history.paths, base, until)
    for record in chain:
        require_same_update(record.rule, what=f"step {record.step} of run {base.run}")
    known = {found.step: found for found in fingerprints_of(history.paths, base.run, 0, after=base.step, until=until)}
    updates = RepeatedUpdates(history, base, stored, chain[0])
    for record in chain:
        with threads_of(record.rule):
            updates.apply(record)
        if record.step in known:
            _require_same(known[record.step], updates.tensors().get, base)
    if until in known:
        made = updates.tensors()
        _require_same(known[until], lambda key: None if key in made else _unchanged(history, stored.get(key)), base)
    return updates


def _require_same(known: StepFingerprint, tensor_of: Callable[[Key], torch.Tensor | None], base: CheckpointRef) -> None:
    differs = first_difference(known, tensor_of)
    if differs is not None:
        raise MismatchError(
            f"step {known.step} of run {base.run}, made again from {base}, is not what the training had: {differs} "
            f"differs from the fingerprint of the step; restore {base.step}, or rebuild the step by a replay"
        )


def _unchanged(history: History, stored: StoredTensor | None) -> torch.Tensor | None:
    """Return a weight or buffer of the base that no update makes, so that it should be the step's too."""
    if stored is None or stored.kind not in ("model", "buffer"):
        return None
    tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
    read_into(history.root, assign(stored.fragments, tensor, start=0, numel=stored.numel))
    return tensor


def _described(step: RedoRef, stored: Mapping[Key, StoredTensor], updates: RepeatedUpdates) -> RebuiltStep:
    """Return the extents of the step: those of what was made, and of what no update changes. What a provider of the
    user's has is left out, since nothing tells what it was."""
    made = updates.tensors()
    kinds = {"model", "buffer", *updates.kinds}
    extents: list[Extent] = []
    held: dict[Extent, torch.Tensor] = {}
    for number, (key, tensor) in enumerate(made.items()):
        like = stored.get(key)
        # State that the checkpoint does not have yet was made by the first update.
        placement, aliases = ("replicated", ()) if like is None else (like.fragments[0].placement, like.aliases)
        extent, elements = held_extent(key, tensor, number=number, placement=placement, aliases=aliases)
        extents.append(extent)
        held[extent] = elements
    for key, unchanged in stored.items():
        if key not in made and key[0] in kinds:
            extents += unchanged.fragments
    ordered = sorted(extents, key=lambda extent: (extent.kind, extent.name, extent.start))
    return RebuiltStep(step.ref, step.base, ordered, held, updates.objects)
