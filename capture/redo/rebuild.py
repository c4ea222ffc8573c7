"""Makes a step again that was not captured, and compares what was made with all that is known of it.

    the checkpoint before  ->  its optimizer in memory  ->  one update for each record, each compared with the step's
    fingerprint where there is one  ->  the tensors of the step

Nothing that differs is handed out: MismatchError names the step and the tensor.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from capture.load.assignments import assign
from capture.load.read_into import read_into
from capture.load.rebuilt import RebuiltStep, held_extent
from capture.redo.fingerprints import first_difference
from capture.redo.steps import RedoRef
from capture.redo.updates import Key
from capture.redo.world import RepeatedSteps
from capture.state.dtypes import torch_dtype
from capture.state.update_rule import require_same_update
from catalog.errors import MismatchError
from catalog.format.fingerprints import StepFingerprint
from catalog.history import History
from catalog.read.fingerprints import fingerprints_of
from catalog.read.fragments import RankFragments, choose, rank_of, stored_tensors
from catalog.read.pins import pinned
from catalog.read.redo import redo_chain
from catalog.records import CheckpointRef, Extent, Placement

__all__ = ["rebuilt_step"]


def rebuilt_step(history: History, step: RedoRef) -> RebuiltStep:
    """Return a step of a redo log with its weights, buffers and optimizer state, made in host memory.

    NotFoundError for a step whose chain of records has a gap, MismatchError where something else than updates has made
    it, where an update would have other bits here, or where what is made is not what the training had; CorruptError for
    damaged files.
    """
    with pinned(history.paths, step.base):
        extents = history.state_extents(step.base)
        steps = _repeated(history, step, extents)
        return _described(step, extents, steps)


def _repeated(history: History, step: RedoRef, extents: Sequence[Extent]) -> RepeatedSteps:
    """Make the updates after the base of a step, whose extents are given, up to the step."""
    base, until = step.base, step.ref.step
    chain = redo_chain(history.paths, base, until)
    for record in (record for records in chain for record in records):
        require_same_update(record.rule, what=f"step {record.step} of run {base.run}")
    steps = RepeatedSteps(history, base, stored_tensors(extents), chain[0])
    known = [
        {one.step: one for one in fingerprints_of(history.paths, base.run, rank, after=base.step, until=until)}
        for rank in range(steps.world_size)
    ]
    for number, records in enumerate(chain, base.step + 1):
        steps.apply(records)
        for rank, of_rank in enumerate(known):
            if number in of_rank:
                _require_same(of_rank[number], partial(_made, steps, rank), base)
    for rank, of_rank in enumerate(known):
        if until in of_rank:
            _require_same(of_rank[until], partial(_unchanged, history, steps, choose(extents, rank=rank), rank), base)
    return steps


def _require_same(known: StepFingerprint, tensor_of: Callable[[Key], torch.Tensor | None], base: CheckpointRef) -> None:
    differs = first_difference(known, tensor_of)
    if differs is not None:
        on = f" on rank {known.rank}" if known.rank else ""
        raise MismatchError(
            f"step {known.step} of run {base.run}, made again from {base}, is not what the training had{on}: {differs} "
            f"differs from the fingerprint of the step; restore {base.step}, or rebuild the step by a replay"
        )


def _made(steps: RepeatedSteps, rank: int, key: Key) -> torch.Tensor | None:
    """Return what the updates have made on a rank."""
    kind, name = key
    return steps.buffers(rank).get(name) if kind == "buffer" else steps.tensors().get(key)


def _unchanged(history: History, steps: RepeatedSteps, base: RankFragments, rank: int, key: Key) -> torch.Tensor | None:
    """Return a weight or buffer of the base that no update makes, so that it should be the step's too."""
    fragments = base.by_key.get(key)
    if fragments is None or key[0] not in ("model", "buffer") or _made(steps, rank, key) is not None:
        return None
    tensor = torch.empty(fragments[0].shape, dtype=torch_dtype(fragments[0].dtype))
    read_into(history.root, assign(fragments, tensor, start=0, numel=tensor.numel()))
    return tensor


def _described(step: RedoRef, extents: Sequence[Extent], steps: RepeatedSteps) -> RebuiltStep:
    """Return the extents of the step: those of what was made, and of what no update changes. What a provider of the
    user's has is left out, since nothing tells what it was."""
    kinds = {"model", "buffer", *steps.kinds}
    like = {(extent.kind, extent.name): extent for extent in extents}
    held: dict[Extent, torch.Tensor] = {}

    def hold(key: Key, tensor: torch.Tensor, rank: int) -> None:
        stored = like.get(key)
        # State that the checkpoint does not have yet was made by the first update.
        new: Placement = "rank_local" if key[0] == "buffer" and steps.world_size > 1 else "replicated"
        placement, aliases = (new, ()) if stored is None else (stored.placement, stored.aliases)
        extent, elements = held_extent(key, tensor, number=len(held), placement=placement, aliases=aliases, rank=rank)
        held[extent] = elements

    made = steps.tensors()
    for key, tensor in made.items():
        hold(key, tensor, 0)
    own: set[tuple[int, Key]] = set()
    for rank in range(steps.world_size):
        for name, buffer in steps.buffers(rank).items():
            hold(("buffer", name), buffer, rank)
            own.add((rank, ("buffer", name)))
    unchanged = [
        extent
        for extent in extents
        if extent.kind in kinds
        and (key := (extent.kind, extent.name)) not in made
        and (rank_of(extent) if extent.placement == "rank_local" else 0, key) not in own
    ]
    ordered = sorted([*held, *unchanged], key=lambda extent: (extent.kind, extent.name, extent.start))
    return RebuiltStep(step.ref, step.base, ordered, held, steps.objects)
