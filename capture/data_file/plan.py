"""Plans one rank's data file: which bytes come from which address, or feeder, and go to which offset.

    0            data_start                                                            data_end
    | header ... | eager and small parts | large runs, at their phase | fed | trailer
                   by falling item size    (address - offset) % align = 0   from a multiple of align on

The order has reasons. By falling item size every small part is aligned to its own item size without padding. A large
*memory run* (neighbouring fragments, such as a flat ZeRO partition) gets an offset congruent to its address modulo
`align`, so that O_DIRECT can write it from where it is, without a copy. Parts that are fed, from devices or
rounded, come last, because their bytes arrive block by block in staging memory, which is aligned anyway.

The whole layout, with the length of the header, is known before the first byte is written: nothing is moved afterwards.
A plan is pure arithmetic, and valid while no address moves.

Parts that need not be written have no place in the file: those that are expected to be unchanged since an earlier
checkpoint, and low-precision weights that are expected to be their masters, rounded.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import native
from capture.changes.change_detector import Watched
from capture.data_file.derivable import Derivable, derivable_parts, masters_of
from capture.data_file.in_place import InPlace
from capture.data_file.parts import HUGE, Part, can_be_referenced, entry_shape, widest_entry
from capture.data_file.planned_rows import PlannedRows
from capture.devices.copies import CUDA, GATHERED_BYTES, DeviceCopier, Mirror
from capture.devices.feed import DevicePart, FedPart
from capture.devices.rounding import RoundedPart
from capture.state.dtypes import dtype_name
from capture.state.interface import TensorItem
from catalog.errors import UnsupportedError
from catalog.format.header import Entry, entries_json, header_bytes_needed
from catalog.records import CHECKSUM_BYTES

__all__ = ["Plan", "Referable", "is_cut", "make_plan", "signature_of"]

MIN_RUN_BYTES = 1 << 20
"""Shorter runs are packed and copied: a request of its own costs more than a copy."""

_HEADER_SLACK_BYTES = 1024
_WIDEST_METADATA = {"format": "dshistory-1", "run": "-" * 128, "step": "-" * 20, "rank": "-" * 5}

_LATE_PADS = [Entry(f"__pad__.at.{HUGE + i}", "U8", (HUGE,), HUGE, HUGE) for i in range(4)]
"""They reserve room for the padding behind what is appended to the plan: three times late bytes, and the file's end."""


@dataclass(frozen=True, slots=True, eq=False)
class Referable:
    """Tells which parts of a plan later checkpoints may refer to: their indices by key, and the offsets and lengths of
    all parts.
    """

    indices: Mapping[str, int]
    offsets: Sequence[int]
    nbytes: Sequence[int]


@dataclass(frozen=True, eq=False)
class Plan:
    """States the layout of one rank's data file. `parts[i]` is at the absolute offset `offsets[i]`; `pads` are the gaps
    as (offset, nbytes); all of them are between data_start and data_end.

    `mirrors` are copies of host tensors that are not dense, or that are eager and rounded, to be made anew at every
    snapshot. Parts that are fed come last, from a multiple of `align` on; `copies` copies those of device tensors. The
    parts in `expected_unchanged` have no offset: an earlier checkpoint is expected to have their bytes. Neither have
    those in `derivable`, which are expected to be their masters, rounded; `paired` are all weights beside their
    masters, those too that have a place.
    """

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    data_start: int
    data_end: int
    align: int
    mirrors: tuple[Mirror, ...]
    copies: DeviceCopier
    entries: tuple[Entry, ...] = field(repr=False, default=())
    expected_unchanged: tuple[Part, ...] = ()
    derivable: tuple[Derivable, ...] = ()
    paired: tuple[Derivable, ...] = ()

    @cached_property
    def write(self) -> native.WritePlan:
        """The plan in the form that the native writer takes."""
        return native.WritePlan(
            offsets=np.array(self.offsets, dtype=np.uint64),
            addresses=np.array([part.address for part in self.parts], dtype=np.uint64),
            nbytes=np.array([part.nbytes for part in self.parts], dtype=np.uint64),
            eager=np.array([part.item.when == "eager" and part.fed is None for part in self.parts], dtype=np.uint8),
            fed=np.array([part.fed is not None for part in self.parts], dtype=np.uint8),
            data_start=self.data_start,
            data_end=self.data_end,
            align=self.align,
        )

    def has_room_for(self, reserve: Sequence[Entry]) -> bool:
        """Return whether the header's reserved length holds these entries beside the plan's own."""
        return header_bytes_needed(reserve, metadata={}) <= self._room

    @cached_property
    def _room(self) -> int:
        return self.data_start - header_bytes_needed(
            [*self.entries, *map(widest_entry, self.unplaced_parts), *_LATE_PADS], metadata=_WIDEST_METADATA
        )

    @cached_property
    def header_json(self) -> bytes:
        """The plan's entries as a fragment of the header."""
        return entries_json(self.entries)

    @cached_property
    def rows(self) -> PlannedRows:
        """The manifest rows of the parts and the pads, without checksums."""
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
    def referable(self) -> Referable:
        """The parts that later checkpoints may refer to, without the tensors."""
        indices = {part.key: i for i, part in enumerate(self.parts) if can_be_referenced(part)}
        return Referable(indices, self.offsets, [part.nbytes for part in self.parts])

    @cached_property
    def unplaced_parts(self) -> tuple[Part, ...]:
        """The parts that are expected to need no place in the file."""
        return (*self.expected_unchanged, *(one.part for one in self.derivable))

    @cached_property
    def offsets_by_key(self) -> Mapping[str, int]:
        """The offset of each part that has one."""
        return {part.key: offset for part, offset in zip(self.parts, self.offsets, strict=True)}

    def parts_of(self, keys: Collection[str]) -> list[Part]:
        """Return the parts with these keys that later checkpoints may refer to."""
        indices = self.referable.indices
        return [self.parts[indices[key]] for key in indices.keys() & keys]

    @cached_property
    def live_parts(self) -> tuple[Part, ...]:
        """The parts whose memory is read after the step too."""
        return tuple(part for part in (*self.parts, *self.unplaced_parts) if part.live and part.nbytes)

    @cached_property
    def watched(self) -> Watched:
        """The live parts, to be compared later with what they are at the step."""
        return Watched(
            [part.item for part in self.live_parts],
            addresses=[part.address for part in self.live_parts],
            nbytes=[part.bytes_in_host for part in self.live_parts],
            copies=self.copies,
        )

    def in_place(self, checksums: bytes) -> InPlace:
        """Return the memory of the parts that are written from where it is; `checksums`: those of all parts."""
        indices, addresses, nbytes = self._in_place
        return InPlace(addresses, nbytes, np.frombuffer(checksums, f"V{CHECKSUM_BYTES}")[indices])

    @cached_property
    def _in_place(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        found = [(i, part) for i, part in enumerate(self.parts) if part.live and part.fed is None and part.nbytes]
        return (
            np.array([i for i, _ in found], np.intp),
            np.array([part.address for _, part in found], np.uint64),
            np.array([part.nbytes for _, part in found], np.uint64),
        )

    @cached_property
    def fed_parts(self) -> tuple[tuple[int, FedPart], ...]:
        """The feeders of the parts that are fed to the writer, with their offsets, in order."""
        placed = zip(self.offsets, self.parts, strict=True)
        return tuple((offset, part.fed) for offset, part in placed if part.fed is not None)

    @property
    def state_bytes(self) -> int:
        """The number of bytes of state, without padding."""
        return sum(part.nbytes for part in (*self.parts, *self.unplaced_parts))


def signature_of(items: Iterable[TensorItem]) -> tuple[Any, ...]:
    """Return a value that stays equal as long as a plan of these items is valid."""
    return tuple(
        (
            item.kind,
            item.name,
            item.start,
            item.placement,
            item.when,
            item.tensor.data_ptr() if item.tensor.layout is torch.strided else 0,
            item.tensor.dtype,
            item.rounded_to,
            item.written,
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
    stored: Container[str] = frozenset(),
    underived: Container[str] = frozenset(),
) -> Plan:
    """Return the layout of this rank's share of `items`. Parts whose keys are in `stored` get no offset, if they may be
    referred to, and neither do weights beside their masters, unless their keys are in `underived`. `reserve` are
    entries (of the objects) that the header must have room for too; `copies` says which tensors are in device memory.
    UnsupportedError names a tensor that can't be captured.
    """
    _check_items(items, copies=copies)
    sources = _Sources(copies)
    parts: list[Part] = []
    unchanged: list[Part] = []
    shares = list(_shares(items, rank, world_size, sources))
    paired = derivable_parts(shares)
    derivable = [one for one in paired if one.part.key not in underived]
    derived = {one.part.key for one in derivable}
    for part in shares:
        if part.key in derived:
            continue
        (unchanged if can_be_referenced(part) and part.key in stored else parts).append(part)
    placer = _Placer(align)
    placer.place(parts)
    data_bytes = _round_up(placer.at, align)
    placer.pad_to(data_bytes)
    entries = _entries(placer)
    # A part that is expected to need no place may need an entry after all, in the trailer.
    late = [*map(widest_entry, [*unchanged, *(one.part for one in derivable)]), *_LATE_PADS]
    needed = header_bytes_needed([*entries, *late, *reserve], metadata=_WIDEST_METADATA)
    data_start = _round_up(needed + needed // 64 + _HEADER_SLACK_BYTES, align)
    return Plan(
        parts=tuple(part for part, _ in placer.placed),
        offsets=tuple(offset + data_start for _, offset in placer.placed),
        pads=tuple((offset + data_start, nbytes) for offset, nbytes in placer.pads),
        data_start=data_start,
        data_end=data_start + data_bytes,
        align=align,
        mirrors=tuple(sources.mirrors),
        copies=copies,
        entries=entries,
        expected_unchanged=tuple(unchanged),
        derivable=tuple(derivable),
        paired=tuple(paired),
    )


class _Placer:
    """Assigns offsets, relative to the start of the data, in growing order."""

    def __init__(self, align: int) -> None:
        self.at = 0
        self.placed: list[tuple[Part, int]] = []
        self.pads: list[tuple[int, int]] = []
        self._align = align

    def place(self, parts: Sequence[Part]) -> None:
        fed = [part for part in parts if part.fed is not None]
        host = [part for part in parts if part.fed is None]
        eager = [part for part in host if part.item.when == "eager"]
        lazy = [part for part in host if part.item.when == "lazy"]
        runs = _runs(lazy)
        small = [part for run in runs if _run_bytes(run) < MIN_RUN_BYTES for part in run]
        # By falling item size every part is aligned to its own item size without a pad.
        self._pack([*sorted(eager, key=_by_itemsize), *sorted(small, key=_by_itemsize)])
        for run in runs:
            if _run_bytes(run) >= MIN_RUN_BYTES:
                self.pad_to(self.at + (run[0].address - self.at) % self._align)
                for part in run:
                    self._put(part)
        if fed:
            # Small ones are side by side, so that many of them need only one copy from the device.
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


class _Sources:
    """Decides from where the bytes of items are read; makes the mirrors of host tensors that are not dense."""

    def __init__(self, copies: DeviceCopier) -> None:
        self.mirrors: list[Mirror] = []
        self._copies = copies

    def source_of(self, item: TensorItem, begin: int, end: int) -> tuple[int, bool, FedPart | None]:
        """Return for elements [begin, end) of the item's tensor the address of host memory, whether the training's own
        memory is read after the step, and what has to be fed to the writer.
        """
        tensor, eager, stored = item.tensor, item.when == "eager", item.stored_dtype
        if self._copies.owns(tensor):
            if begin == end:
                return 0, False, None
            return 0, not eager, DevicePart(tensor, begin, end, stored, keep=eager)
        address = tensor.data_ptr() + begin * tensor.element_size()
        rounded = stored != tensor.dtype
        if tensor.is_contiguous() and not rounded:
            return address, not eager, None
        if tensor.is_contiguous() and not eager and begin < end:
            return address, True, RoundedPart(address, end - begin, tensor.dtype, stored)
        mirror = Mirror(torch.empty(tensor.shape, dtype=stored), tensor)
        self.mirrors.append(mirror)
        return mirror.host.data_ptr() + begin * stored.itemsize, False, None


def _by_itemsize(part: Part) -> int:
    return -part.itemsize


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Group parts that are neighbours in memory, in the order of their addresses."""
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


def _shares(items: Sequence[TensorItem], rank: int, world_size: int, sources: _Sources) -> Iterable[Part]:
    """Yield this rank's part of every item."""
    for item, (begin, end) in zip(items, _ranges(items, rank, world_size), strict=True):
        numel, itemsize = item.tensor.numel(), item.stored_dtype.itemsize
        if item.placement == "replicated" and begin >= end and not (numel == 0 and rank == 0):
            continue
        if item.placement == "partitioned" and not numel:
            # A rank that holds no element of a tensor writes no row for it.
            continue
        address, live, fed = sources.source_of(item, begin, end)
        dtype = dtype_name(item.stored_dtype, what=f"{item.kind} {item.name!r}")
        device, rounded = (fed, None) if isinstance(fed, DevicePart) else (None, fed)
        yield Part(item, item.start + begin, end - begin, address, itemsize, dtype, live, device, rounded)


def _ranges(items: Sequence[TensorItem], rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return which elements of every item this rank writes: all, of what only it has. Replicated items are one long row
    of bytes, cut into equal shares, except where a rank has its own range to write, and for weights whose masters are
    replicated too: these are cut where the masters are, so that one rank writes both.
    """
    shared = [item for item in items if is_cut(item)]
    like = masters_of(shared)
    row = [item for item in shared if like.get(id(item), item) is item]
    cuts = {id(item): cut for item, cut in zip(row, _cuts(row, rank, world_size), strict=True)}
    return [
        cuts[id(like.get(id(item), item))] if is_cut(item) else item.written or (0, item.tensor.numel())
        for item in items
    ]


def is_cut(item: TensorItem) -> bool:
    """Return whether the ranks cut a tensor into shares: all of them have it, and none has its own range to write."""
    return item.placement == "replicated" and item.written is None


def _cuts(items: Sequence[TensorItem], rank: int, world_size: int) -> Iterator[tuple[int, int]]:
    """Yield this rank's share of each item in one long row of bytes."""
    total = sum(_tensor_bytes(item) for item in items)
    lower, upper = total * rank // world_size, total * (rank + 1) // world_size
    at = 0
    for item in items:
        numel, itemsize = item.tensor.numel(), item.stored_dtype.itemsize
        # Both sides of a cut are rounded in the same direction, so that the shares meet.
        begin = min(numel, max(0, _ceil_div(lower - at, itemsize)))
        yield begin, min(numel, max(0, _ceil_div(upper - at, itemsize)))
        at += numel * itemsize


def _check_items(items: Sequence[TensorItem], *, copies: DeviceCopier) -> None:
    """Raise UnsupportedError, by name, for a tensor without bytes of its own, on a device that nothing can copy from,
    or with the name of another item.
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
                f"{item.kind} {item.name!r} is expanded: several of its elements share one place in memory, so it "
                "can't be restored; make it contiguous()"
            )
        key = (item.kind, item.name, item.start)
        if key in seen:
            raise UnsupportedError(
                f"two State Providers offer {item.kind} {item.name!r}: give one of them another name"
            )
        seen.add(key)


def _tensor_bytes(item: TensorItem) -> int:
    return item.tensor.numel() * item.stored_dtype.itemsize


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
