"""Finds tensors that were written to, or freed, although their memory was to stay as it is until the barrier.

torch counts in-place writes in a tensor's version counter. It does not count writes through `.data`, through a NumPy
array or by another process that shares the memory; those are found in the bytes: a sample of every tensor's, or all.
"""

import itertools
import operator
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

import native
from capture.snapshot.kept_items import Held, references_to, tensors_of
from capture.state.interface import TensorItem
from catalog.records import CHECKSUM_BYTES

__all__ = ["ChangeDetector", "Check", "Watched", "addresses_of", "bytes_compared_whole"]

Check = Literal["sampled", "versions", "hash"]
"""What is compared besides addresses: "versions", the version counters; "sampled", a sample of the bytes too; "hash",
all bytes too.
"""


def addresses_of(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """Return where the tensors' memory begins now."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


def _addresses_of_storages(storages: Sequence[torch.UntypedStorage] | None) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(torch.UntypedStorage.data_ptr, storages or ()), np.uint64)


_version_of = operator.attrgetter("_version")
_seeds = itertools.count()


class Watched:
    """Tensors that are to stay as they are, in the form in which thousands of them are compared at once. It is used for
    as long as none of them has moved, and holds no kept item's tensor: `tensors` does.

    nbytes: how many bytes of each item's memory are looked at, from the address in `addresses` on; 0 for memory that
    the host can't read where it is
    uncounted: memory of up to so many bytes is compared by its bytes alone, all of which are looked at. This is not
    enough while the memory is being read, because an edit that is undone leaves no trace in the bytes
    """

    def __init__(
        self, items: Sequence[TensorItem], *, addresses: Sequence[int], nbytes: Sequence[int], uncounted: int = 0
    ) -> None:
        self.items = items
        self.addresses = np.array(addresses, dtype=np.uint64)
        self.nbytes = np.array(nbytes, dtype=np.uint64)
        self._references = references_to(items)
        tensors = [item.tensor for item in items]
        self._places = addresses_of(tensors)
        # A write through a DTensor is counted there, one to its local memory is not. Inference tensors count nothing.
        self._counts = [
            not tensor.is_inference() and not 0 < length <= uncounted
            for tensor, length in zip(tensors, nbytes, strict=True)
        ]
        counting = np.flatnonzero(self._counts).tolist()
        around = [(index, item.dtensor) for index, item in enumerate(items) if item.dtensor is not None]
        self._dtensors = [dtensor for _, dtensor in around if not dtensor.is_inference()]
        outer = [index for index, dtensor in around if not dtensor.is_inference()]
        self._counted_items = np.array([*counting, *outer], dtype=np.intp)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors, held from now on."""
        return tensors_of(self._references)

    def moved(self, tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.bool_]:
        """Return for each of the `tensors` whether its memory is somewhere else since this was made, as freed memory
        is.
        """
        moved: npt.NDArray[np.bool_] = self._places != addresses_of(tensors)
        return moved

    def unread(self) -> list[TensorItem]:
        """Return the items whose bytes are not looked at."""
        return [item for item, nbytes in zip(self.items, self.nbytes, strict=True) if item.tensor.nbytes and not nbytes]

    def versions(self, tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
        """Return the version counters of the `tensors` as they are now, and those of the DTensors around them."""
        counted = itertools.chain(itertools.compress(tensors, self._counts), self._dtensors)
        return np.fromiter(map(_version_of, counted), np.int64, len(self._counted_items))

    def items_of(self, counters: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Return the indices of the items that these version counters belong to."""
        return self._counted_items[counters]


def bytes_compared_whole(check: Check) -> int:
    """Return the length in bytes up to which `check` compares all bytes of a tensor in host memory."""
    return {"versions": 0, "sampled": native.SAMPLED_WHOLE_BYTES, "hash": sys.maxsize}[check]


class ChangeDetector:
    """Remembers what the watched tensors hold as far as `check` says, for `changed` to compare. None of them may have
    moved since `watched` was made.

    held: what keeps their memory. A tensor that is then given other memory (`p.data = x`) has not changed, as long as
    its old memory is as it was; without `held` it has
    tensors: those of `watched`, where the caller has them already
    """

    def __init__(
        self,
        watched: Watched,
        *,
        check: Check = "sampled",
        held: Held | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._watched = watched
        self.check = check
        self._seed = next(_seeds)
        self._storages = None if held is None else held.storages
        self._storage_places = _addresses_of_storages(self._storages)
        # Not kept: what the training lets go is free at once, unless `held` holds it.
        self._versions = watched.versions(watched.tensors() if tensors is None else tensors)
        self._digests = self._read_digests()

    @property
    def items(self) -> Sequence[TensorItem]:
        """The items that are watched."""
        return self._watched.items

    @property
    def unread(self) -> list[TensorItem]:
        """The items in which only writes that torch counts are found."""
        return list(self._watched.items) if self.check == "versions" else self._watched.unread()

    def changed(self) -> list[str]:
        """Return the tensors that were written to, or freed, since this was made."""
        tensors = self._watched.tensors()
        if self._storages is None:
            different = self._watched.moved(tensors)
        else:
            different = self._storage_places != _addresses_of_storages(self._storages)
        different[self._watched.items_of(self._versions != self._watched.versions(tensors))] = True
        if not different.any():
            # Only now: memory that was freed must not be read.
            different = self._digests != self._read_digests()
        return [self.items[index].label for index in np.flatnonzero(different).tolist()]

    def let_go(self) -> None:
        """Hold no tensor any more. To be called after the last `changed`."""
        self._watched, self._storages = Watched((), addresses=(), nbytes=()), None

    def _read_digests(self) -> npt.NDArray[np.void]:
        where = {"addresses": self._watched.addresses, "nbytes": self._watched.nbytes}
        if self.check == "hash":
            return np.frombuffer(native.checksum_memory(**where), f"V{CHECKSUM_BYTES}")
        if self.check == "sampled":
            return np.frombuffer(native.sampled_digests(**where, seed=self._seed), "V8")
        return np.zeros(len(self._watched.items), "V1")
