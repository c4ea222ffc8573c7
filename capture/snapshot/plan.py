"""From live references to the layout of one rank's data file: which bytes come from where and go to which offset.

The eager region comes first, then small pieces, then every large *memory run* (neighbouring fragments, such as a flat
ZeRO partition) at an offset congruent to its address, so that the device can take it without a copy. A plan is valid
while no address moves; it is pure arithmetic.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

import native
from capture.snapshot.device_copies import CUDA, GATHERED_BYTES, DeviceCopier, Mirror
from capture.snapshot.device_feed import DevicePart
from capture.snapshot.manifest_rows import PlannedRows
from capture.snapshot.origins import Origins
from capture.snapshot.parts import Part, can_be_referenced, entry_shape, widest_entry
from capture.state.dtypes import dtype_name
from capture.state.interface import TensorItem
from catalog.errors import UnsupportedError
from catalog.format.header import Entry, entries_json, header_bytes_needed

__all__ = ["Plan", "make_plan", "signature_of"]

MIN_RUN_BYTES = 1 << 20
"""Shorter runs are packed and copied: a request of its own costs more than a copy."""

_HEADER_SLACK_BYTES = 1024
_WIDEST_METADATA = {"format": "dshistory-1", "run": "-" * 128, "step": "-" * 20, "rank": "-" * 5}


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's layout. `parts[i]` lies at absolute `offsets[i]`; `pads` are the gaps as (offset, nbytes); all between
    data_start and data_end.

    `mirrors` are of host tensors that are not dense, to be copied anew at every snapshot. Parts of device tensors come
    last, from a multiple of `align` on. `resting` parts have no place: they are expected to be where an earlier checkpoint
    has them.
    """

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    data_start: int
    data_end: int
    align: int
    mirrors: tuple[Mirror, ...]
    entries: tuple[Entry, ...] = field(repr=False, default=())
    resting: tuple[Part, ...] = ()

    @cached_property
    def write(self) -> native.WritePlan:
        """The same for the native writer."""
        return native.WritePlan(
            offsets=np.array(self.offsets, dtype=np.uint64),
            addresses=np.array([part.address for part in self.parts], dtype=np.uint64),
            nbytes=np.array([part.nbytes for part in self.parts], dtype=np.uint64),
            eager=np.array([part.item.when == "eager" and part.device is None for part in self.parts], dtype=np.uint8),
            fed=np.array([part.device is not None for part in self.parts], dtype=np.uint8),
            data_start=self.data_start,
            data_end=self.data_end,
            align=self.align,
        )

    def has_room_for(self, reserve: Sequence[Entry]) -> bool:
        """Whether the header's reserved length holds these entries beside the plan's own."""
        return header_bytes_needed(reserve, metadata={}) <= self._room

    @cached_property
    def _room(self) -> int:
        return self.data_start - header_bytes_needed(
            [*self.entries, *map(widest_entry, self.resting)], metadata=_WIDEST_METADATA
        )

    @cached_property
    def header_json(self) -> bytes:
        """The plan's entries as a fragment of the header."""
        return entries_json(self.entries)

    @cached_property
    def rows(self) -> PlannedRows:
        """The manifest rows of the parts and the pads."""
        parts = [
            {
                "name": part.item.name,
                "kind": part.item.kind,
                "dtype": part.dtype,
                "shape": part.item.shape,
                "start": part.start,
                "numel": part.numel,
                "offset": offset,
                "nbytes": part.nbytes,
                "placement": part.item.placement,
                "aliases": part.item.aliases,
                "codec": "raw",
                "base": None,
            }
            for part, offset in zip(self.parts, self.offsets, strict=True)
        ]
        return PlannedRows(parts, self.pads)

    @cached_property
    def live_parts(self) -> tuple[Part, ...]:
        """The parts whose memory is read after the step too."""
        return tuple(part for part in (*self.parts, *self.resting) if part.live and part.nbytes)

    @cached_property
    def live_items(self) -> tuple[TensorItem, ...]:
        """The items of these parts, each once for each part."""
        return tuple(part.item for part in self.live_parts)

    @cached_property
    def device_parts(self) -> tuple[tuple[int, DevicePart], ...]:
        """What is fed, with its offsets, in order."""
        placed = zip(self.offsets, self.parts, strict=True)
        return tuple((offset, part.device) for offset, part in placed if part.device is not None)

    @property
    def state_bytes(self) -> int:
        """Bytes of state, without padding."""
        return sum(part.nbytes for part in (*self.parts, *self.resting))


def signature_of(items: Iterable[TensorItem]) -> tuple[Any, ...]:
    """What must be unchanged for a plan to stay valid."""
    return tuple(
        (
            item.kind,
            item.name,
            item.start,
            item.placement,
            item.when,
            item.tensor.data_ptr() if item.tensor.layout is torch.strided else 0,
            item.tensor.dtype,
            item.tensor.shape,
            item.tensor.stride(),
        )
        for item in items
    )


def make_plan(
    items: Sequence[TensorItem],
    *,
    rank: int,
    world_size: int,
    align: int,
    reserve: Sequence[Entry],
    copies: DeviceCopier = CUDA,
    resting: Container[str] = frozenset(),
) -> Plan:
    """The layout of this rank's share of `items`, but for those whose keys are `resting`. `reserve` are entries (of the
    objects) that the header must have room for too; `copies` says which tensors lie in device memory.
    """
    _check_items(items, copies=copies)
    sources = Origins(copies)
    parts: list[Part] = []
    rest: list[Part] = []
    for part in _shares(items, rank, world_size, sources):
        (rest if can_be_referenced(part) and part.key in resting else parts).append(part)
    placer = _Placer(align)
    placer.place(parts)
    data_bytes = _round_up(placer.at, align)
    placer.pad_to(data_bytes)
    entries = _entries(placer)
    needed = header_bytes_needed([*entries, *map(widest_entry, rest), *reserve], metadata=_WIDEST_METADATA)
    data_start = _round_up(needed + needed // 64 + _HEADER_SLACK_BYTES, align)
    return Plan(
        parts=tuple(part for part, _ in placer.placed),
        offsets=tuple(offset + data_start for _, offset in placer.placed),
        pads=tuple((offset + data_start, nbytes) for offset, nbytes in placer.pads),
        data_start=data_start,
        data_end=data_start + data_bytes,
        align=align,
        mirrors=tuple(sources.mirrors),
        entries=entries,
        resting=tuple(rest),
    )


class _Placer:
    """Gives out offsets, relative to the start of the data, in growing order."""

    def __init__(self, align: int) -> None:
        self.at = 0
        self.placed: list[tuple[Part, int]] = []
        self.pads: list[tuple[int, int]] = []
        self._align = align

    def place(self, parts: Sequence[Part]) -> None:
        fed = [part for part in parts if part.device is not None]
        host = [part for part in parts if part.device is None]
        eager = [part for part in host if part.item.when == "eager"]
        lazy = [part for part in host if part.item.when == "lazy"]
        runs = _runs(lazy)
        small = [part for run in runs if _run_bytes(run) < MIN_RUN_BYTES for part in run]
        # By falling item size every part is aligned to its own without a pad; what has no bytes goes anywhere.
        self._pack([*sorted(eager, key=_by_itemsize), *sorted(small, key=_by_itemsize)])
        for run in runs:
            if _run_bytes(run) >= MIN_RUN_BYTES:
                self.pad_to(self.at + (run[0].address - self.at) % self._align)
                for part in run:
                    self._put(part)
        if fed:
            # Small ones side by side, so that many of them are one copy.
            self._align_to(self._align)
            self._pack(sorted(fed, key=lambda part: (part.nbytes >= GATHERED_BYTES, _by_itemsize(part))))

    def pad_to(self, offset: int) -> None:
        if offset > self.at:
            self.pads.append((self.at, offset - self.at))
            self.at = offset

    def _pack(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._align_to(part.itemsize if part.nbytes else 1)
            self._put(part)

    def _align_to(self, size: int) -> None:
        self.pad_to(_round_up(self.at, size))

    def _put(self, part: Part) -> None:
        self.placed.append((part, self.at))
        self.at += part.nbytes


def _by_itemsize(part: Part) -> int:
    return -part.itemsize


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours in memory together, by address."""
    runs: list[list[Part]] = []
    end = -1
    for part in sorted(parts, key=lambda part: (part.address, part.nbytes)):
        if part.address == end and runs:
            runs[-1].append(part)
        else:
            runs.append([part])
        end = part.address + part.nbytes
    return runs


def _run_bytes(run: Sequence[Part]) -> int:
    return sum(part.nbytes for part in run)


def _entries(placer: _Placer) -> tuple[Entry, ...]:
    entries = []
    for part, offset in placer.placed:
        entries.append(Entry(part.key, part.dtype, entry_shape(part), offset, offset + part.nbytes))
    for i, (offset, nbytes) in enumerate(placer.pads):
        entries.append(Entry(f"__pad__.{i}", "U8", (nbytes,), offset, offset + nbytes))
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))


def _shares(items: Sequence[TensorItem], rank: int, world_size: int, sources: Origins) -> Iterable[Part]:
    """This rank's part of every item. Replicated items are one long row of bytes, cut into equal shares."""
    total = sum(_tensor_bytes(item) for item in items if item.placement == "replicated")
    lower, upper = total * rank // world_size, total * (rank + 1) // world_size
    at = 0
    for item in items:
        numel, itemsize = item.tensor.numel(), item.tensor.element_size()
        begin, end = 0, numel
        if item.placement == "replicated":
            # Rounded in the same direction on both sides of a cut, so that the shares meet.
            begin = min(numel, max(0, _ceil_div(lower - at, itemsize)))
            end = min(numel, max(0, _ceil_div(upper - at, itemsize)))
            at += numel * itemsize
            if begin >= end and not (numel == 0 and rank == 0):
                continue
        elif item.placement == "partitioned" and not numel:
            # A rank that holds nothing of a tensor has nothing to say of it.
            continue
        address, live, device = sources.place(item, begin, end)
        dtype = dtype_name(item.tensor.dtype, what=f"{item.kind} {item.name!r}")
        yield Part(item, item.start + begin, end - begin, address, itemsize, dtype, live, device)


def _check_items(items: Sequence[TensorItem], *, copies: DeviceCopier) -> None:
    """UnsupportedError, by name, for what has no bytes of its own, a device that nobody can copy from, or a name that
    another item has.
    """
    seen: set[tuple[str, str, int]] = set()
    for item in items:
        tensor = item.tensor
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
            raise UnsupportedError(f"{item.kind} {item.name!r} is no plain dense tensor: it can't be captured")
        if tensor.device.type != "cpu" and not copies.owns(tensor):
            raise UnsupportedError(
                f"{item.kind} {item.name!r} is on {tensor.device}: only CPU and CUDA tensors can be captured"
            )
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise UnsupportedError(
                f"{item.kind} {item.name!r} is expanded: several of its elements share one place in memory, so it can't be "
                "restored; make it contiguous()"
            )
        key = (item.kind, item.name, item.start)
        if key in seen:
            raise UnsupportedError(
                f"two State Providers offer {item.kind} {item.name!r}: give one of them another name"
            )
        seen.add(key)


def _tensor_bytes(item: TensorItem) -> int:
    return item.tensor.numel() * item.tensor.element_size()


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
