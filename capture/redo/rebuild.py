"""Makes a step again that was not captured, and compares what was made with all that is known of it.

    the checkpoint before  ->  its optimizer in memory  ->  one update for each record, each compared with the step's
    fingerprint where there is one  ->  the tensors of the step

Nothing that differs is handed out: MismatchError names the step and the tensor.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from capture.load.assignments import Assignment
from capture.load.read_into import read_into
from capture.load.rebuilt import RebuiltStep, held_extent
from capture.redo.fingerprints import RankFingerprints, first_difference
from capture.redo.steps import RedoRef
from capture.redo.updates import Key, read_later
from capture.redo.world import RepeatedSteps
from capture.state.update_rule import require_same_update
from catalog.access.pins import pinned
from catalog.errors import MismatchError
from catalog.format.fingerprints import StepFingerprint
from catalog.history import History
from catalog.read.fragments import RankFragments, choose, rank_of, stored_tensors
from catalog.read.redo import RedoChain, RedoRecord
from catalog.records import CheckpointRef, Extent, Placement

__all__ = ["RebuiltSteps", "rebuilt_step"]


class RebuiltSteps:
    """Makes steps again, one after the other: of those behind the same checkpoint that are asked for in ascending
    order, each update is made once. To be closed, which lets go of the checkpoint."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._pins = ExitStack()
        self._way: _Way | None = None

    def __enter__(self) -> "RebuiltSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self, step: RedoRef) -> RebuiltStep:
        """Return a step of a redo log with its weights, buffers and optimizer state, made in host memory, which the
        next call may overwrite.

        NotFoundError for a step whose chain of records has a gap, MismatchError where something else than updates has
        made it, where an update would have other bits here, or where what is made is not what the training had;
        CorruptError for damaged files.
        """
        if self._way is None or self._way.base != step.base or self._way.reached > step.ref.step:
            self.close()
            self._pins.enter_context(pinned(self._history.paths, step.base))
            self._way = _Way(self._history, step.base)
        try:
            return self._way.make(step)
        except BaseException:
            # Half of an update may be made, so the next call begins at the checkpoint again.
            self.close()
            raise

    def close(self) -> None:
        """Let go of the checkpoint, and of what was made."""
        self._way = None
        self._pins.close()


def rebuilt_step(history: History, step: RedoRef) -> RebuiltStep:
    """Return one step of a redo log; errors are those of `RebuiltSteps.make`."""
    with RebuiltSteps(history) as steps:
        return steps.make(step)


class _Way:
    """The way from one checkpoint to the steps after it, as far as it has been gone."""

    def __init__(self, history: History, base: CheckpointRef) -> None:
        self.base = base
        self.reached = base.step
        self._history = history
        self._extents = history.state_extents(base)
        self._chain = RedoChain(history.paths, base)
        self._steps: RepeatedSteps | None = None
        self._known: Sequence[RankFingerprints] = ()

    def make(self, step: RedoRef) -> RebuiltStep:
        """Go on to a step that is not before where this has been."""
        until = step.ref.step
        records = self._chain.records(until, after=self.reached)
        steps = self._go(until, records)
        for rank, of_rank in enumerate(self._known):
            known = of_rank.of(until)
            if known is not None:
                base = choose(self._extents, rank=rank)
                _require_same(known, partial(_unchanged, self._history, steps, base, rank), self.base)
        return _described(step, self._extents, steps)

    def _go(self, until: int, chain: Sequence[Sequence[RedoRecord]]) -> RepeatedSteps:
        for record in (record for records in chain for record in records):
            require_same_update(record.rule, what=f"step {record.step} of run {self.base.run}")
        if self._steps is None:
            self._steps = RepeatedSteps(self._history, self.base, stored_tensors(self._extents), chain[0])
            ranks = range(self._steps.world_size)
            self._known = [RankFingerprints(self._history.paths, self.base.run, rank) for rank in ranks]
        for number, records in enumerate(chain, self.reached + 1):
            self._steps.apply(records)
            self.reached = number
            for rank, of_rank in enumerate(self._known):
                known = of_rank.of(number)
                if known is not None:
                    _require_same(known, partial(_made, self._steps, rank), self.base)
        return self._steps


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
    assignments: list[Assignment] = []
    tensor = read_later(fragments, assignments)
    read_into(history.root, assignments)
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
