"""The state of one rank, as its State Providers list it: their objects encoded, and the plan of a data file for it all.

The order is fixed by the types: objects are read first, because the length of the file's header depends on them, and
only with them a plan is made. A plan is kept as long as no provider's tensors have moved.
"""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import torch

import native
from capture.changes.change_detector import ChangeDetector, Check, Watched, bytes_compared_whole
from capture.changes.fingerprints import Fingerprint, Traced
from capture.changes.kept_items import all_alive
from capture.changes.listed import Listed
from capture.data_file.data_file import PlacedObject, object_entries
from capture.data_file.late_bytes import ObjectTensors
from capture.data_file.plan import Plan, is_cut, make_plan, signature_of
from capture.devices.copies import CUDA, DeviceCopier
from capture.devices.feed import FeedTake
from capture.snapshot.transient_state import BufferKeeper, TransientState
from capture.state.interface import (
    ChangedByForward,
    Fingerprinted,
    ReadAt,
    StateProvider,
    TensorItem,
    is_looked_at,
    read_at,
)
from capture.state.objects import encode_object, have_same_content
from capture.state.own_kinds import OWN_KINDS, STATE_OF_OPTIMIZERS
from capture.state.row_major import dense_bytes
from capture.unwritten.dedup import StoredAt
from capture.unwritten.rounding_expectation import RoundingExpectation
from catalog.disk.json_file import canonical
from catalog.errors import UnsupportedError
from catalog.format.fingerprints import seed_of
from catalog.format.header import Entry

__all__ = ["EncodedObjects", "StateListing"]

_NOTHING_STORED: Mapping[str, StoredAt] = {}


@dataclass(frozen=True)
class EncodedObjects:
    """The objects that this rank writes, as they were when they were read; and all of those that are read right after
    the update, by the provider's id.
    """

    placed: Sequence[PlacedObject]
    read_at_step: Mapping[int, Sequence[PlacedObject]]

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """Their entries in a header, each at least as long as the real one."""
        return object_entries(self.placed)


class StateListing:
    """The providers of one rank, asked for objects and tensors. Each declares when its objects are read."""

    def __init__(
        self,
        providers: Sequence[StateProvider],
        *,
        rank: int,
        world_size: int,
        align: int,
        copies: DeviceCopier = CUDA,
    ) -> None:
        self.providers = tuple(providers)
        self._staying = [
            one for one in self.providers if isinstance(one, Fingerprinted) and not isinstance(one, ChangedByForward)
        ]
        self._changing = [
            one for one in self.providers if isinstance(one, Fingerprinted) and isinstance(one, ChangedByForward)
        ]
        self._rank = rank
        self._world_size = world_size
        self._align = align
        self._copies = copies
        self._plan: Plan | None = None
        self._planned_for: tuple[Hashable, ...] = ()
        self._stored = _NOTHING_STORED
        self.rounding = RoundingExpectation()
        self._planned_but = self.rounding.underived
        self._lists: dict[int, Listed] = {}
        self._watched: tuple[list[Listed], Watched] | None = None
        self._beside: tuple[list[Listed], Watched] | None = None
        self._traced: Traced | None = None
        self._buffers = BufferKeeper(self.providers)
        self._looked_at: set[str] = set()

    # Objects.

    def read_objects(self, kept: TransientState | None = None) -> EncodedObjects:
        """Encode this rank's objects as they are now, except those that `kept` has. UnsupportedError names an object
        that can't be stored, that two providers offer, or that has the name of a kind of tensors.
        """
        found: dict[str, PlacedObject] = {}
        at_step: dict[int, Sequence[PlacedObject]] = {}
        for provider in self.providers:
            of_step = read_at(provider) == "step"
            known = None if kept is None else kept.objects.get(id(provider))
            objects = _encode(provider, live=not of_step) if known is None else known
            if of_step:
                at_step[id(provider)] = objects
            for placed in objects:
                name = placed.encoded.name
                if is_looked_at(provider):
                    self._looked_at.add(name)
                    _refuse_kinds({name}, OWN_KINDS | STATE_OF_OPTIMIZERS)
                if name in found:
                    raise UnsupportedError(
                        f"two State Providers offer an object {name!r}: give one of them another name"
                    )
                found[name] = placed
        mine = [placed for placed in found.values() if placed.placement == "rank_local" or self._rank == 0]
        return EncodedObjects(mine, at_step)

    def read_next_forward(self) -> list[PlacedObject]:
        """Encode, as they are now, the objects that are read at the next forward."""
        return [placed for provider in self._reading("next_forward") for placed in _encode(provider, live=True)]

    # The state of a step that may be captured later.

    def keep(self, step: int, *, check: Check) -> TransientState:
        """Copy the state of the step that has just ended which does not stay until the next update, and remember the
        rest as far as `check` says. UnsupportedError while a CUDA graph is captured: nothing may be copied into it.
        """
        self.require_running()
        watched, tensors = self._weights(check)
        weights = ChangeDetector(watched, check=check, seed=seed_of(step), tensors=tensors)
        return TransientState(step, weights, self._buffers.keep(), self.read_at_step())

    def fingerprint(self, step: int, *, check: Check, detector: ChangeDetector | None = None) -> Fingerprint:
        """Take the fingerprint of the state as it is now, which is that of `step`; what `detector` has read right
        before is not read again. UnsupportedError while a CUDA graph is captured, or for a tensor that can't be stored.
        """
        self.require_running()
        stay = self._weights(check)[0] if detector is None else detector.watched
        others = self._others()
        if self._traced is None or self._traced.stay is not stay or self._traced.others is not others:
            self._traced = Traced(stay, others, check=check)
        return self._traced.fingerprint(step, detector=detector)

    def read_at_step(self) -> Mapping[int, Sequence[PlacedObject]]:
        """Encode, as they are now, the objects that are read right after the update, by the provider's id."""
        objects = {}
        for provider in self._reading("step"):
            # One that fails is asked again when the step is captured, and its error is reported there.
            with contextlib.suppress(Exception):
                objects[id(provider)] = _encode(provider)
        return objects

    def keep_edited(self, kept: TransientState, *, before: Mapping[int, Sequence[PlacedObject]]) -> TransientState:
        """Return `kept` after a declared edit: with the buffers as they are now, and with those objects as they are now
        that the edit itself has changed from what they were `before` it. Others may be ahead of the step already, as a
        data loader that the loop has asked for the next batch.
        """
        now = self.read_at_step()
        objects = {
            key: now[key] if key in now and not _are_same(now[key], before.get(key, ())) else kept.objects[key]
            for key in kept.objects
            if key in now
        }
        return TransientState(kept.step, None, self._buffers.keep(), objects)

    def changed(self, kept: TransientState) -> list[str]:
        """Return the weights and optimizer state that are not those of the step any more: written to, freed, or
        replaced by others; after a load also what it may have written without a trace. UnsupportedError while a CUDA
        graph is captured.
        """
        self.require_running()
        if kept.weights is None:
            return []
        if kept.accessed and kept.weights.unread:
            return [item.label for item in kept.weights.unread]
        return kept.weights.changed() or _replaced(kept.weights.items, self._weights(kept.weights.check)[0].items)

    def keep_next_forward(self, kept: TransientState) -> TransientState:
        """Return `kept` with the objects that are read at the next forward, as they are now."""
        final = {id(provider): _encode(provider) for provider in self._reading("next_forward")}
        return replace(kept, objects={**kept.objects, **final})

    def lost_buffers(self, kept: TransientState) -> list[str]:
        """Return the buffers that have changed since `kept`, and were not copied."""
        return self._buffers.lost(kept.buffers)

    # The plan.

    def plan(
        self,
        objects: EncodedObjects,
        *,
        kept: TransientState | None = None,
        stored: Mapping[str, StoredAt] = _NOTHING_STORED,
    ) -> Plan:
        """Return the layout of this rank's file for the state as it is now, with the buffers that `kept` has instead of
        the live ones, and without the parts that are expected to be unchanged since they were `stored`, or to be their
        masters, rounded. Its header has room for `objects`.
        """
        underived = self.rounding.underived
        listed = [self._listed(provider) for provider in self.providers]
        items = [item for _, of_provider in listed for item in of_provider]
        planned_for = tuple(fingerprint for fingerprint, _ in listed)
        if kept is not None and kept.buffers.copies:
            items = [_as_kept(item, kept) for item in items]
            # Copies are new memory every time: such a plan is for one snapshot.
            planned_for = ()
        expected = self._stored is stored and self._planned_but is underived
        same = expected and bool(planned_for) and self._planned_for == planned_for
        usable = same and self._plan is not None and all_alive(self._plan.watched.items)
        if self._plan is None or not usable or not self._plan.has_room_for(objects.entries):
            _refuse_kinds(self._looked_at, {item.kind for item in items})
            self._plan = make_plan(
                items,
                rank=self._rank,
                world_size=self._world_size,
                align=self._align,
                reserve=objects.entries,
                copies=self._copies,
                stored=stored,
                underived=underived,
            )
            self._planned_for, self._stored, self._planned_but = planned_for, stored, underived
        return self._plan

    def planned_bytes(self, stored: Mapping[str, StoredAt]) -> int:
        """Return the bytes that the file of this rank is planned to take for the state as it is now, without what is
        appended to it. The errors are those of `plan`.
        """
        return self.plan(EncodedObjects((), {}), stored=stored).data_end

    def layout_hash(self) -> str:
        """Return a hash of the name, kind, shape and dtype of every tensor that this rank writes, and of the world
        size.

        Everything is read and planned for it, so state that can't be captured is refused here, before there is a run;
        the first snapshot uses the same plan.
        """
        plan = self.plan(self.read_objects())
        rows = sorted(
            (part.item.kind, part.item.name, list(part.item.shape), part.dtype)
            for part in (*plan.parts, *plan.unplaced_parts)
        )
        return native.checksum(canonical({"world_size": self._world_size, "parts": rows})).hex()

    def shared_row(self) -> list[tuple[str, str, str, int]]:
        """Return kind, name, dtype and number of elements of what the ranks cut into shares, in order."""
        items = (item for provider in self.providers for item in self._listed(provider)[1])
        return [(item.kind, item.name, str(item.stored_dtype), item.tensor.numel()) for item in items if is_cut(item)]

    def forget_tensors(self) -> None:
        """List all tensors anew for the next plan: some were created, moved or freed."""
        self._lists.clear()

    # Memory that the writer can't read where it is.

    def require_running(self) -> None:
        """Raise UnsupportedError while a CUDA graph is captured: there is no state then."""
        self._copies.require_running()

    def take(self, plan: Plan, writer: native.Writer) -> FeedTake | None:
        """Copy what the plan mirrors, and prepare to feed what it feeds, None where there is nothing. To be called at
        the step. SetupError when the staging memory can't be pinned.
        """
        for mirror in plan.mirrors:
            mirror.host.copy_(mirror.source.detach())
        if not plan.fed_parts:
            return None
        offsets, parts = zip(*plan.fed_parts, strict=True)
        return FeedTake(parts, offsets, end=plan.data_end, writer=writer, copies=self._copies)

    def begin_tensors(
        self, objects: Sequence[PlacedObject], *, job: native.WriteJob, align: int, after: Callable[[], None]
    ) -> ObjectTensors:
        """Begin to write the live tensors of `objects` behind the other bytes of `job`, once `after` has returned."""
        return ObjectTensors(objects, job, align=align, copies=self._copies, after=after)

    def end(self, writer: native.Writer) -> None:
        """Unpin the writer's staging memory before it is closed; every snapshot must be finished or aborted."""
        self._copies.unpin(writer)

    def _reading(self, when: ReadAt) -> list[StateProvider]:
        return [provider for provider in self.providers if read_at(provider) == when]

    def _listed(self, provider: StateProvider) -> tuple[Hashable, Sequence[TensorItem]]:
        """Return the provider's fingerprint and tensors; it lists them only when the fingerprint has changed."""
        if not isinstance(provider, Fingerprinted):
            items = provider.tensors()
            return signature_of(items), items
        known = self._current(provider)
        return known.fingerprint, known.items

    def _current(self, provider: Fingerprinted, *, rooted: bool = False) -> Listed:
        """Return what `provider` lists now; with `rooted` tensors may have moved, but no others have come instead."""
        known = self._lists.get(id(provider))
        if known is None or not ((rooted and known.is_rooted_as_before()) or known.is_current(provider)):
            known = self._lists[id(provider)] = Listed(provider)
        return known

    def _weights(self, check: Check) -> tuple[Watched, list[torch.Tensor]]:
        """Return the tensors that stay as they are between two updates, which are those of the providers that have
        fingerprints, without buffers, and hold them. It costs 200 ns a tensor as long as they are the same.
        """
        listed = [self._current(provider, rooted=True) for provider in self._staying]
        if self._watched is not None and self._watched[0] == listed:
            watched = self._watched[1]
            tensors = watched.tensors()
            if not watched.moved(tensors).any():
                return watched, tensors
            listed = [self._current(provider) for provider in self._staying]
        items = [item for one in listed for item in one.items if _stays(item)]
        watched = self._watch(items, uncounted=bytes_compared_whole(check))
        self._watched = listed, watched
        return watched, watched.tensors()

    def _others(self) -> Watched:
        """Return the tensors of the providers that have fingerprints that do not stay until the next update: buffers,
        and numbers of optimizers. To be called where `_weights` has just been, which has looked at their roots.
        """
        buffers = [self._current(provider, rooted=True) for provider in self._changing]
        listed = [*(self._lists[id(provider)] for provider in self._staying), *buffers]
        if self._beside is not None and self._beside[0] == listed:
            watched = self._beside[1]
            if not watched.moved(watched.tensors()).any():
                return watched
            listed = [self._current(provider) for provider in (*self._staying, *self._changing)]
        others = self._watch([item for one in listed for item in one.items if not _stays(item)])
        self._beside = listed, others
        return others

    def _watch(self, items: Sequence[TensorItem], *, uncounted: int = 0) -> Watched:
        addresses = [item.tensor.data_ptr() for item in items]
        nbytes = [0 if self._copies.owns(item.tensor) else dense_bytes(item.tensor) for item in items]
        return Watched(items, addresses=addresses, nbytes=nbytes, uncounted=uncounted, copies=self._copies)


def _stays(item: TensorItem) -> bool:
    return item.when == "lazy" or item.kind == "model"


def _replaced(before: Sequence[TensorItem], now: Sequence[TensorItem]) -> list[str]:
    """Return the names of the items of which `now` has not the same memory in the same form."""
    if before is now:
        return []
    found = dict(zip(signature_of(now), now, strict=True))
    return [item.label for item, signature in zip(before, signature_of(before), strict=True) if signature not in found]


def _encode(provider: StateProvider, *, live: bool = False) -> list[PlacedObject]:
    named = is_looked_at(provider)
    return [
        PlacedObject(encode_object(name, value, live=live, named=named), placement)
        for name, (value, placement) in provider.objects().items()
    ]


def _are_same(one: Sequence[PlacedObject], other: Sequence[PlacedObject]) -> bool:
    return len(one) == len(other) and all(
        have_same_content(a.encoded, b.encoded) for a, b in zip(one, other, strict=True)
    )


def _refuse_kinds(names: Set[str], kinds: Set[str]) -> None:
    for name in sorted(names & kinds):
        raise UnsupportedError(
            f"a State Provider offers an object {name!r}, and checkpoints have tensors of the kind {name!r} by "
            "themselves: give it another name"
        )


def _as_kept(item: TensorItem, kept: TransientState) -> TensorItem:
    copy = kept.buffers.copies.get(item.name) if item.kind == "buffer" else None
    return item if copy is None else replace(item, tensor=copy)
