"""Takes the fingerprint of a step on one rank: a digest of every tensor of its weights, buffers and optimizer state.

What the host reads is read on the training thread, since the memory is the step's only until the next update; devices
compute theirs in the order of the training's work, and are waited for in the background. Digests that a step's change
detector has read are used, not read again: the seed follows from the step, so that two runs and two ranks look at the
same places of a tensor at the same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from capture.changes.change_detector import ChangeDetector, Check, Watched
from capture.devices.digests import Reading
from capture.state.dtypes import dtype_name
from catalog.format.fingerprints import DIGEST_BYTES, Coverage, TensorTable, TracedTensor, seed_of
from native import SAMPLED_WHOLE_BYTES, checksum

__all__ = ["Fingerprint", "Traced"]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """Holds what was read of a step; devices may still compute their part. It keeps no memory of the training's."""

    step: int
    table: TensorTable
    host: Sequence[npt.NDArray[np.void]]
    devices: Sequence[tuple[npt.NDArray[np.intp], Reading]]

    @property
    def nbytes(self) -> int:
        """The size of its digests."""
        return DIGEST_BYTES * len(self.table.tensors)

    def digests(self) -> bytes:
        """Wait for the devices, and return the digests of all tensors. Any thread may call it. RuntimeError when a
        device could not compute its own.
        """
        # A digest is the first bytes of a checksum, which has 16.
        found = [one.view(np.uint8).reshape(len(one), -1)[:, :DIGEST_BYTES] for one in self.host]
        merged = np.concatenate(found) if found else np.zeros((0, DIGEST_BYTES), np.uint8)
        for places, reading in self.devices:
            for place, digest in zip(places.tolist(), reading.digests(), strict=True):
                merged[place] = np.frombuffer(checksum(digest)[:DIGEST_BYTES], np.uint8)
        return merged.tobytes()


class Traced:
    """Keeps watched tensors in the form in which fingerprints of many steps are taken: those that change detectors look
    at, and others, which they do not."""

    def __init__(self, stay: Watched, others: Watched, *, check: Check) -> None:
        self.stay, self.others = stay, others
        # A session that compares no bytes while tensors are read still takes a sample of them here.
        self._check: Check = "sampled" if check == "versions" else check
        self._places = (
            np.array(stay.on_device, np.intp),
            np.array(others.on_device, np.intp) + len(stay.items),
        )
        tensors = (traced for watched in (stay, others) for traced in _described(watched, self._check))
        self._table = TensorTable(tuple(tensors))

    def fingerprint(self, step: int, *, detector: ChangeDetector | None) -> Fingerprint:
        """Read the tensors as they are now; `detector` has read those that stay at this step already, if it is of the
        same check."""
        seed = seed_of(step)
        if detector is not None and detector.check == self._check:
            read = detector.digests, detector.on_device
        else:
            read = self.stay.digests(self._check, seed=seed), self.stay.read_devices(self._check)
        both = (read, (self.others.digests(self._check, seed=seed), self.others.read_devices(self._check)))
        host = [digests for digests, _ in both if len(digests)]
        devices = zip(self._places, (reading for _, reading in both), strict=True)
        return Fingerprint(step, self._table, host, [(at, reading) for at, reading in devices if reading is not None])


def _described(watched: Watched, check: Check) -> list[TracedTensor]:
    on_device = set(watched.on_device)
    found = []
    for index, (item, nbytes) in enumerate(zip(watched.items, watched.nbytes.tolist(), strict=True)):
        tensor = item.tensor
        found.append(
            TracedTensor(
                item.kind,
                item.name,
                dtype_name(tensor.dtype, what=item.label),
                item.shape,
                item.start,
                tensor.numel(),
                item.placement,
                _coverage(check, read=nbytes, of=tensor.nbytes, on_device=index in on_device),
            )
        )
    return found


def _coverage(check: Check, *, read: int, of: int, on_device: bool) -> Coverage:
    if on_device:
        return "device_hash" if check == "hash" else "device"
    if of and not read:
        return "none"
    if check == "hash":
        return "hash"
    return "whole" if read <= SAMPLED_WHOLE_BYTES else "sampled"
