"""Finds tensors that were written to, or freed, although their memory was to stay as it is until the barrier.

torch counts in-place writes in a tensor's version counter. It does not count writes through `.data`, through a NumPy
array or by another process that shares the memory; those are found in the bytes: a sample of every tensor's, or all.
Those of a device are read by the device, in the order of the work that the calling thread gives to it, and compared
when the host needs to know.
"""

import contextlib
import itertools
import operator
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

import native
from capture.changes.kept_items import Held, references_to, tensors_of
from capture.devices.copies import CUDA, DeviceCopier
from capture.devices.digests import DeviceDigests, Reading, sample_of, words_of
from capture.state.interface import TensorItem
from catalog.errors import SnapshotError, UnsupportedError
from catalog.records import CHECKSUM_BYTES

__all__ = ["ChangeDetector", "Check", "Comparison", "Watched", "addresses_of", "bytes_compared_whole"]

Check = Literal["sampled", "versions", "hash"]
"""Beside addresses, "versions" compares the version counters; "sampled" also a sample of the bytes, "hash" all of them.
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
    copies: which items are in a device's memory, which is looked at as a whole
    """

    def __init__(
        self,
        items: Sequence[TensorItem],
        *,
        addresses: Sequence[int],
        nbytes: Sequence[int],
        uncounted: int = 0,
        copies: DeviceCopier = CUDA,
    ) -> None:
        self.items = items
        self.copies = copies
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
        seen = {index for index, _ in self._words}
        return [
            item
            for index, (item, nbytes) in enumerate(zip(self.items, self.nbytes, strict=True))
            if item.tensor.nbytes and not nbytes and index not in seen
        ]

    @property
    def on_device(self) -> list[int]:
        """The indices of the items whose bytes devices read."""
        return [index for index, _ in self._words]

    @property
    def devices(self) -> list[torch.device]:
        """The devices that read them."""
        return list(dict.fromkeys(words.device for _, words in self._words))

    @cached_property
    def sampled_on_device(self) -> DeviceDigests:
        return DeviceDigests([sample_of(words) for _, words in self._words])

    @cached_property
    def all_on_device(self) -> DeviceDigests:
        return DeviceDigests([words for _, words in self._words])

    @cached_property
    def _words(self) -> list[tuple[int, torch.Tensor]]:
        owned = [(i, words_of(item.tensor)) for i, item in enumerate(self.items) if self.copies.owns(item.tensor)]
        return [(index, words) for index, words in owned if words is not None]

    def digests(self, check: Check, *, seed: int) -> npt.NDArray[np.void]:
        """Return what the host reads of each item's memory as far as `check` says, in one digest for each: of a sample
        at places that `seed` decides, V8 [items], or of all bytes, V16 [items].
        """
        where = {"addresses": self.addresses, "nbytes": self.nbytes}
        if check == "hash":
            return np.frombuffer(native.checksum_memory(**where), f"V{CHECKSUM_BYTES}")
        if check == "sampled":
            return np.frombuffer(native.sampled_digests(**where, seed=seed), "V8")
        return np.zeros(len(self.items), "V1")

    def read_devices(self, check: Check) -> Reading | None:
        """Tell the devices to read as far as `check` says; None where there are none, or nothing to be read."""
        if check == "versions" or not self.on_device:
            return None
        return (self.all_on_device if check == "hash" else self.sampled_on_device).read()

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
    moved since `watched` was made. To be made on the training thread: devices read what all work that it has given to
    them leaves.

    seed: decides at which places large tensors are looked at; by default at others each time
    held: what keeps their memory. A tensor that is then given other memory (`p.data = x`) has not changed, as long as
    its old memory is as it was; without `held` it has
    tensors: those of `watched`, where the caller has them already
    """

    def __init__(
        self,
        watched: Watched,
        *,
        check: Check = "sampled",
        seed: int | None = None,
        held: Held | None = None,
        tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._watched = watched
        self.check = check
        self._seed = next(_seeds) if seed is None else seed
        self._storages = None if held is None else held.storages
        self._storage_places = _addresses_of_storages(self._storages)
        # Not kept: what the training lets go is free at once, unless `held` holds it.
        self._versions = watched.versions(watched.tensors() if tensors is None else tensors)
        self.digests = watched.digests(check, seed=self._seed)
        self.on_device = watched.read_devices(check)

    @property
    def watched(self) -> Watched:
        """The tensors that are watched."""
        return self._watched

    @property
    def items(self) -> Sequence[TensorItem]:
        """The items that are watched."""
        return self._watched.items

    @property
    def unread(self) -> list[TensorItem]:
        """The items in which only writes that torch counts are found."""
        return list(self._watched.items) if self.check == "versions" else self._watched.unread()

    def changed(self) -> list[str]:
        """Return the tensors that were written to, or freed, since this was made, before all that the calling thread
        has given to a device so far has ended.
        """
        return self.compare().changed()

    def compare(self) -> "Comparison":
        """Read as much again as `check` says. Does not wait for a device: whatever is given to it later may write.
        While a CUDA graph is captured devices read nothing: it would become part of the graph.
        """
        try:
            self._watched.copies.require_running()
            return self._compared(self._watched.read_devices(self.check))
        except UnsupportedError:
            return self._compared(None)
        except RuntimeError as error:
            return Comparison([], failure=error)

    def compare_beside(self, *, all_bytes: bool = True) -> "Comparison":
        """Do the same in a thread that is not the training's: devices read beside the training, behind the last
        `DeviceCopier.begin`, and are waited for. Without `all_bytes` they don't read as much as `check="hash"` asks.
        """
        devices = self._watched.devices if self.check != "versions" else []
        if not devices or (self.check == "hash" and not all_bytes):
            return self._compared(None)
        try:
            with contextlib.ExitStack() as stack:
                for device in devices:
                    self._watched.copies.enter_thread(device)
                    stack.enter_context(self._watched.copies.beside(device))
                return Comparison(self.changed())
        except RuntimeError as error:
            return Comparison([], failure=error)

    def let_go(self) -> None:
        """Hold no tensor any more. To be called after the last comparison."""
        self._watched, self._storages = Watched((), addresses=(), nbytes=()), None

    def _compared(self, on_device: Reading | None) -> "Comparison":
        tensors = self._watched.tensors()
        if self._storages is None:
            different = self._watched.moved(tensors)
        else:
            different = self._storage_places != _addresses_of_storages(self._storages)
        different[self._watched.items_of(self._versions != self._watched.versions(tensors))] = True
        if not different.any():
            # Only now: memory that was freed must not be read.
            different = self.digests != self._watched.digests(self.check, seed=self._seed)
        found = [self.items[index].label for index in np.flatnonzero(different).tolist()]
        labels = [self.items[index].label for index in self._watched.on_device]
        readings = None if on_device is None or self.on_device is None else (self.on_device, on_device)
        return Comparison(found, labels, readings)


class Comparison:
    """The findings of a ChangeDetector at some moment, also if devices have not computed all of them yet. A device that
    fails, for want of memory for example, is reported to those who ask, not to the training at its barrier.
    """

    def __init__(
        self,
        found: list[str],
        labels: Sequence[str] = (),
        readings: tuple[Reading, Reading] | None = None,
        *,
        failure: RuntimeError | None = None,
    ) -> None:
        self._found = found
        self._failure = failure
        self._labels = labels
        self._readings = readings

    @property
    def is_bad(self) -> bool:
        """True when it is known already that a tensor had changed, or that a device could not look."""
        return bool(self._found) or self._failure is not None

    def changed(self) -> list[str]:
        """Wait for the devices, and return the tensors that had changed. From any thread. SnapshotError when a device
        could not look.
        """
        if self._failure is not None:
            raise SnapshotError(f"the device can't compare its memory: {self._failure}") from self._failure
        if self._found or self._readings is None:
            return self._found
        then, now = self._readings
        return [self._labels[index] for index in np.flatnonzero(then.different(now)).tolist()]
