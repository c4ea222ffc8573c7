"""Makes a step again that was not captured, and compares what was made with all that is known of it.

    the checkpoint before  ->  its optimizer in memory  ->  one update for each record, each compared with the step's
    fingerprint where there is one  ->  the tensors of the step

Nothing that differs is handed out: MismatchError names the step and the tensor.
"""

from collections.abc import Mapping

import torch

from capture.load.rebuilt import RebuiltStep, held_extent
from capture.redo.fingerprints import first_difference
from capture.redo.steps import RedoRef
from capture.redo.updates import Key, RepeatedUpdates
from capture.state.update_rule import require_same_update, threads_of
from catalog.errors import MismatchError
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
        updates = _repeated(history, step.base, step.ref.step, stored)
        return _described(step, stored, updates)


def _repeated(history: History, base: CheckpointRef, until: int, stored: Mapping[Key, StoredTensor]) -> RepeatedUpdates:
    """Make the updates after `base`, whose tensors are `stored`, up to the step `until`."""
    chain = redo_chain(history.paths, base, until)
    for record in chain:
        require_same_update(record.rule, what=f"step {record.step} of run {base.run}")
    known = {found.step: found for found in fingerprints_of(history.paths, base.run, 0, after=base.step, until=until)}
    updates = RepeatedUpdates(history, base, stored, chain[0])
    for record in chain:
        with threads_of(record.rule):
            updates.apply(record)
        if record.step in known:
            differs = first_difference(known[record.step], updates.tensors())
            if differs is not None:
                raise MismatchError(
                    f"step {record.step} of run {base.run}, made again from {base}, is not what the training had: "
                    f"{differs} differs from the fingerprint of the step; restore {base.step}, or rebuild the step by "
                    "a replay"
                )
    return updates


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
