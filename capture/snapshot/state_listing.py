"""What a rank has to capture: its State Providers asked, and the plan for what they list kept while nothing moves."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import native
from capture.snapshot.change_detector import ChangeDetector
from capture.snapshot.data_file import PlacedObject, object_entries
from capture.snapshot.dedup import StoredAt
from capture.snapshot.device_copies import CUDA, DeviceCopier
from capture.snapshot.device_feed import DeviceTake
from capture.snapshot.plan import Plan, make_plan, signature_of
from capture.snapshot.transient_state import Moments, TransientState
from capture.state.interface import Fingerprinted, StateProvider, TensorItem
from capture.state.objects import encode_object
from catalog.errors import UnsupportedError
from catalog.format.header import Entry

__all__ = ["StateListing"]


_NONE: Mapping[str, StoredAt] = {}


class StateListing:
    """The providers of one rank. `of_user` are those of them whose objects may move until the next forward."""

    def __init__(
        self,
        providers: Sequence[StateProvider],
        *,
        of_user: Sequence[StateProvider] = (),
        rank: int,
        world_size: int,
        align: int,
        copies: DeviceCopier = CUDA,
    ) -> None:
        self.providers = tuple(providers)
        self.of_user = tuple(of_user)
        self._rank = rank
        self._world_size = world_size
        self._align = align
        self._copies = copies
        self._reserve: list[Entry] = []
        self._plan: Plan | None = None
        self._layout: Hashable = None
        self._resting: Mapping[str, StoredAt] = _NONE
        self._lists: dict[int, tuple[Hashable, Sequence[TensorItem]]] = {}
        self._moments = Moments(self.providers)
        self._offered: dict[str, StateProvider] = {}

    def objects(self, moment: TransientState | None = None) -> list[PlacedObject]:
        """This rank's objects as they are now, but for what `moment` has kept. UnsupportedError names what can't be stored."""
        kept = {} if moment is None else {placed.encoded.name: placed for placed in moment.objects}
        placed = dict(kept)
        offered = {name: self._offered[name] for name in kept}
        passing = self._moments.providers if moment is not None else ()
        for provider in self.providers:
            if any(provider is one for one in passing):
                continue
            for name, found in self._ask(provider):
                if name in offered and name not in kept:
                    raise UnsupportedError(
                        f"two State Providers offer an object {name!r}: give one of them another name"
                    )
                offered[name] = provider
                placed.setdefault(name, found)
        self._offered = offered
        mine = [item for item in placed.values() if item.placement == "rank_local" or self._rank == 0]
        self._reserve = object_entries(mine)
        return mine

    def latest(self, names: frozenset[str]) -> list[PlacedObject]:
        """These objects, and the user's, as they are now."""
        asked = [*self.of_user, *(provider for name, provider in self._offered.items() if name in names)]
        return self._all_of(asked)

    def moment(self, step: int, *, keep: frozenset[str]) -> TransientState:
        """What of the step that has just ended won't stay; `keep` names further objects that won't."""
        asked = [*self._moments.providers, *(provider for name, provider in self._offered.items() if name in keep)]
        return self._moments.take(step, self._witness(), self._all_of(asked))

    def _witness(self) -> ChangeDetector:
        """Of the tensors that were listed last: nothing is listed anew."""
        return ChangeDetector([item for _, items in self._lists.values() for item in items if item.when == "lazy"])

    def forget(self) -> None:
        """Keep no plan: something has moved."""
        self._lists.clear()

    def freeze(self, moment: TransientState, names: frozenset[str]) -> TransientState:
        """The moment with these objects, and the user's, as they are now: what follows is not the step's any more."""
        kept = [placed for placed in moment.objects if placed.encoded.name not in names]
        return replace(moment, objects=[*kept, *self.latest(names)])

    def offers(self, name: str) -> bool:
        """Whether the state has an object of this name."""
        return name in self._offered

    def lost(self, moment: TransientState) -> list[str]:
        """The buffers that are not any more as they were at `moment`, nor kept."""
        return self._moments.lost(moment)

    def plan(self, moment: TransientState | None = None, *, resting: Mapping[str, StoredAt] = _NONE) -> Plan:
        """The layout of this rank's file for the state as it is now, but for the buffers that `moment` has kept, and without
        what is `resting`; its header has room for the objects as they were last.
        """
        listed = [self._listed(provider) for provider in self.providers]
        items = [item for _, of_provider in listed for item in of_provider]
        layout = tuple(layout for layout, _ in listed)
        if moment is not None and moment.buffers:
            items = [_as_kept(item, moment) for item in items]
            layout = ()
        same = self._layout == layout and self._resting is resting
        if self._plan is None or not same or not layout or not self._plan.has_room_for(self._reserve):
            self._plan = make_plan(
                items,
                rank=self._rank,
                world_size=self._world_size,
                align=self._align,
                reserve=self._reserve,
                copies=self._copies,
                resting=resting,
            )
            self._layout, self._resting = layout, resting
        return self._plan

    def fits(self, plan: Plan) -> bool:
        """Whether the header of `plan` has room for the objects as they are by now."""
        return plan.has_room_for(self._reserve)

    def take(self, plan: Plan, writer: native.Writer) -> DeviceTake | None:
        """Take at the step what the writer can't read where it is: host tensors are copied now, what a device has is to
        be fed. SetupError when the staging memory can't be pinned.
        """
        for mirror in plan.mirrors:
            mirror.host.copy_(mirror.source)
        if not plan.device_parts:
            return None
        offsets, parts = zip(*plan.device_parts, strict=True)
        return DeviceTake(parts, offsets, end=plan.data_end, writer=writer, copies=self._copies)

    def end(self, writer: native.Writer) -> None:
        """Let the writer's staging memory go, before it is closed; every snapshot is finished or aborted."""
        self._copies.unpin(writer)

    def _listed(self, provider: StateProvider) -> tuple[Hashable, Sequence[TensorItem]]:
        """What a provider lists, and a sign of it; asked again only where the layout has changed or can't be told."""
        if not isinstance(provider, Fingerprinted):
            items = provider.tensors()
            return signature_of(items), items
        known = self._lists.get(id(provider))
        if known is None or known[0] != provider.fingerprint():
            # In this order: what can't be listed is refused by name.
            items = provider.tensors()
            known = self._lists[id(provider)] = provider.fingerprint(), items
        return known

    def _all_of(self, providers: Iterable[StateProvider]) -> list[PlacedObject]:
        once = {id(provider): provider for provider in providers}
        return [placed for provider in once.values() for _, placed in self._ask(provider)]

    def _ask(self, provider: StateProvider) -> list[tuple[str, PlacedObject]]:
        return [
            (name, PlacedObject(encode_object(name, value), placement))
            for name, (value, placement) in provider.objects().items()
        ]


def _as_kept(item: TensorItem, moment: TransientState) -> TensorItem:
    kept = moment.buffers.get(item.name) if item.kind == "buffer" else None
    return item if kept is None else replace(item, tensor=kept)
