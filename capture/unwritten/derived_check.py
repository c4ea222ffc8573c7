"""Finds out, while the training goes on, which low-precision weights are their masters, rounded: these are not stored.

A thread reads both from the training's memory, piece by piece, and compares them bit by bit; the checksum of the
weights is computed on the way. Weights of a device pass through a little host memory for it, and the device compares
them, where it has the masters too. A weight that differs anywhere (an edit, stochastic rounding, another layout) is
written behind the planned bytes, from where it is.
"""

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

import native
from capture.data_file.data_file import PlacedPiece, piece_of_part
from capture.data_file.derivable import Derivable
from capture.data_file.late_bytes import BackgroundReader, Chunk, append, chunks_of
from capture.data_file.parts import Part
from capture.devices.copies import DeviceCopier
from capture.devices.feed import DevicePart
from capture.devices.rounded_weights import are_rounded, rounds_as_defined
from catalog.errors import SnapshotError
from catalog.format.dtypes import ROUNDED_FROM
from catalog.records import Extent

__all__ = ["DerivedCheck", "Place"]

_PIECE_ELEMENTS = 1 << 20
"""Between two pieces the thread looks whether it is to stop."""

Place = tuple[str, int, bytes]
"""A data file, relative to the history, an offset in it, and the checksum of the bytes that are there."""


class _Checksums(NamedTuple):
    """The checksum of a weight, and that of its master's elements where the host has read them."""

    weights: bytes
    masters: bytes | None


class DerivedCheck(BackgroundReader):
    """Compares weights with their masters in a thread, and appends those that differ to `job`'s file, once `after` has
    returned; the memory of both must stay until `wait` returns. To be made on the training thread: devices compare what
    all work that it has given to them leaves.

    After `wait`, `differing` has the keys of those that differ, `placed` says where they are, and `references` gives
    the manifest rows of the others.
    """

    def __init__(
        self,
        derivable: Sequence[Derivable],
        job: native.WriteJob,
        *,
        align: int,
        copies: DeviceCopier,
        after: Callable[[], None],
    ) -> None:
        self.differing: frozenset[str] = frozenset()
        self.placed: list[PlacedPiece] = []
        self._derivable = derivable
        self._job = job
        self._align = align
        self._copies = copies
        self._after = after
        self._on_device = {one.part.key: one.elements() for one in derivable if one.part.device is not None}
        copies.begin([tensor for pair in self._on_device.values() for tensor in pair if copies.owns(tensor)])
        self._checksums: list[tuple[Derivable, _Checksums]] = []
        self._stopping = threading.Event()
        super().__init__(self._compare if derivable else None, name="dshistory-round")

    @property
    def derived_bytes(self) -> int:
        """The number of bytes that are not stored."""
        return sum(one.part.nbytes for one, _ in self._checksums)

    @property
    def equal(self) -> frozenset[str]:
        """The keys of the weights that are their masters, rounded."""
        return frozenset(one.part.key for one, _ in self._checksums)

    def stop(self) -> None:
        """End the comparison as soon as can be: nobody asks for what it finds."""
        self._stopping.set()

    def let_go(self) -> None:
        """Hold no memory of a device any more. To be called after `wait`."""
        self._on_device = {}

    def references(self, places: Mapping[str, Place]) -> list[Extent]:
        """Return the rows of the weights that are not stored, where `places` has those of the masters, by key.
        SnapshotError for a master that was stored with other bytes than those that were compared.
        """
        return [_row(one, checksums, places[one.master.key]) for one, checksums in self._checksums]

    def _compare(self) -> None:
        for device in {weights.device for weights, _ in self._on_device.values()}:
            self._copies.enter_thread(device)
        others = []
        for one in self._derivable:
            checksums = self._checksums_if_rounded(one)
            if self._stopping.is_set():
                return
            if checksums is None:
                others.append(one.part)
            else:
                self._checksums.append((one, checksums))
        if others:
            self.differing = frozenset(part.key for part in others)
            self._after()
            chunks = (chunk for part in others for chunk in self._pieces(part))
            self.placed = append(self._job, [piece_of_part(part) for part in others], chunks, align=self._align)

    def _checksums_if_rounded(self, one: Derivable) -> _Checksums | None:
        """Return the checksums of a weight and of its master, None where a bit differs, or once it is to stop."""
        if one.master.device is None:
            return self._if_rounded_in_host(one)
        with self._copies.beside(one.master.device.tensor.device):
            return self._if_rounded_on_device(one, *self._on_device[one.part.key])

    def _if_rounded_in_host(self, one: Derivable) -> _Checksums | None:
        comparison = native.RoundedComparison(one.part.dtype)
        masters = one.master_address
        for address, nbytes in self._pieces(one.part):
            numel = nbytes // one.part.itemsize
            if self._stopping.is_set() or not comparison.add(masters=masters, weights=address, numel=numel):
                return None
            masters += numel * one.master.itemsize
        return _Checksums(*comparison.end())

    def _if_rounded_on_device(self, one: Derivable, weights: torch.Tensor, masters: torch.Tensor) -> _Checksums | None:
        if not rounds_as_defined(weights.device, weights.dtype):
            return None
        running = native.RunningChecksum()
        at = 0
        for address, nbytes in self._pieces(one.part):
            upto = at + nbytes // one.part.itemsize
            if self._stopping.is_set() or not bool(are_rounded(weights[at:upto], masters[at:upto])):
                return None
            running.add((ctypes.c_ubyte * nbytes).from_address(address))
            at = upto
        return _Checksums(running.end(), None)

    def _pieces(self, part: Part) -> Iterator[Chunk]:
        """Yield the bytes of a weight, in order, each piece until the next one is asked for."""
        if part.device is not None:
            weights, _ = self._on_device[part.key]
            yield from chunks_of(DevicePart(weights, 0, part.numel, weights.dtype, keep=False), self._copies)
            return
        size = _PIECE_ELEMENTS * part.itemsize
        for at in range(0, part.nbytes, size):
            yield part.address + at, min(size, part.nbytes - at)


def _row(one: Derivable, checksums: _Checksums, place: Place) -> Extent:
    part = one.part
    file, offset, stored = place
    if part.numel == one.master.numel and checksums.masters not in (None, stored):
        raise SnapshotError(
            f"{one.master.item.kind} {one.master.item.name}: written to after the step while it was being read; wrap "
            "such edits in `with session.modify():`"
        )
    row = part.row(file=file, offset=offset + one.skip * one.master.itemsize, checksum=checksums.weights)
    return dataclasses.replace(row, codec="rounded", base=ROUNDED_FROM)
