"""Finds out, while the training goes on, which low-precision weights are their masters, rounded: these are not stored.

A thread reads both from the training's memory, piece by piece, and compares them bit by bit; the checksum of the
weights is computed on the way. A weight that differs anywhere (an edit, stochastic rounding, another layout) is written
behind the planned bytes, from where it is.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import native
from capture.snapshot.data_file import PlacedPiece, piece_of_part
from capture.snapshot.derivable import Derivable
from capture.snapshot.late_bytes import BackgroundReader, append
from catalog.errors import SnapshotError
from catalog.format.dtypes import ROUNDED_FROM
from catalog.records import Extent

__all__ = ["DerivedCheck", "Place"]

_PIECE_ELEMENTS = 1 << 20
"""Between two pieces the thread looks whether it is to stop."""

Place = tuple[str, int, bytes]
"""A data file, relative to the history, an offset in it, and the checksum of the bytes that are there."""


class DerivedCheck(BackgroundReader):
    """Compares weights with their masters in a thread, and appends those that differ to `job`'s file, once `after` has
    returned; the memory of both must stay until `wait` returns. To be made on the training thread.

    After `wait`, `differing` has the keys of those that differ, `placed` says where they are, and `references` gives
    the manifest rows of the others.
    """

    def __init__(
        self,
        derivable: Sequence[Derivable],
        job: native.WriteJob,
        *,
        align: int,
        after: Callable[[], None],
    ) -> None:
        self.differing: frozenset[str] = frozenset()
        self.placed: list[PlacedPiece] = []
        self._derivable = derivable
        self._job = job
        self._align = align
        self._after = after
        self._checksums: list[tuple[Derivable, tuple[bytes, bytes]]] = []
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

    def references(self, places: Mapping[str, Place]) -> list[Extent]:
        """Return the rows of the weights that are not stored, where `places` has those of the masters, by key.
        SnapshotError for a master that was stored with other bytes than those that were compared.
        """
        return [_row(one, *checksums, places[one.master.key]) for one, checksums in self._checksums]

    def _compare(self) -> None:
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
            chunks = ((part.address, part.nbytes) for part in others)
            self.placed = append(self._job, [piece_of_part(part) for part in others], chunks, align=self._align)

    def _checksums_if_rounded(self, one: Derivable) -> tuple[bytes, bytes] | None:
        """Return the checksums of a weight and of its master, None where a bit differs, or once it is to stop."""
        part, masters = one.part, one.master_address
        comparison = native.RoundedComparison(part.dtype)
        for at in range(0, part.numel, _PIECE_ELEMENTS):
            numel = min(_PIECE_ELEMENTS, part.numel - at)
            weights = part.address + at * part.itemsize
            if self._stopping.is_set() or not comparison.add(
                masters=masters + at * one.master.itemsize, weights=weights, numel=numel
            ):
                return None
        return comparison.end()


def _row(one: Derivable, checksum: bytes, compared: bytes, place: Place) -> Extent:
    part = one.part
    file, offset, stored = place
    if part.numel == one.master.numel and stored != compared:
        raise SnapshotError(
            f"{one.master.item.kind} {one.master.item.name}: written to after the step while it was being read; wrap "
            "such edits in `with session.modify():`"
        )
    row = part.row(file=file, offset=offset + one.skip * one.master.itemsize, checksum=checksum)
    return dataclasses.replace(row, codec="rounded", base=ROUNDED_FROM)
