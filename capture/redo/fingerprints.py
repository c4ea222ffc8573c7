"""Compares tensors in memory with the fingerprints that a training has left of its steps."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from capture.state.dtypes import dtype_name
from catalog.format.fingerprints import DIGEST_BYTES, StepFingerprint, TracedTensor, seed_of
from catalog.paths import HistoryPaths
from catalog.read.fingerprints import fingerprints_of
from native import checksum_memory, sampled_digests

__all__ = ["RankFingerprints", "first_difference"]

_READ_BY_HOST = ("whole", "sampled", "hash")


class RankFingerprints:
    """The fingerprints of one rank of a run, which are read once when they are asked for in ascending order."""

    def __init__(self, paths: HistoryPaths, run: str, rank: int) -> None:
        self._place = paths, run, rank
        self._left: Iterator[StepFingerprint] = iter(())
        self._last: StepFingerprint | None = None

    def of(self, step: int) -> StepFingerprint | None:
        """Return the fingerprint of a step that is not before the one asked for last; None where there is none."""
        if self._last is None or self._last.step < step:
            self._last = next((one for one in self._left if one.step >= step), None)
        if self._last is None:
            # A training that goes on may have left more.
            self._left = fingerprints_of(*self._place, after=step - 1)
            self._last = next(self._left, None)
        return self._last if self._last is not None and self._last.step == step else None


def first_difference(known: StepFingerprint, tensor_of: Callable[[tuple[str, str]], torch.Tensor | None]) -> str | None:
    """Return the first tensor of a fingerprint that is another one here, or None when there is none. `tensor_of` gives
    a whole tensor by its kind and name; None leaves it out, as one is of which only a device has read something.
    """
    for traced, digest in zip(known.table.tensors, known.digests.tolist(), strict=True):
        if traced.coverage not in _READ_BY_HOST:
            continue
        tensor = tensor_of((traced.kind, traced.name))
        if tensor is not None and _digest(tensor, traced, seed=seed_of(known.step)) != digest:
            return traced.label
    return None


def _digest(tensor: torch.Tensor, traced: TracedTensor, *, seed: int) -> int | None:
    """Return the digest of a part of a tensor as the fingerprint has it; None when the tensor has another form."""
    if tuple(tensor.shape) != traced.shape or dtype_name(tensor.dtype, what=traced.label) != traced.dtype:
        return None
    if traced.start + traced.numel > tensor.numel():
        return None
    whole = tensor.contiguous().view(-1)[traced.start : traced.start + traced.numel]
    addresses = np.array([whole.data_ptr()], np.uint64)
    nbytes = np.array([whole.nbytes], np.uint64)
    if traced.coverage == "hash":
        found = checksum_memory(addresses=addresses, nbytes=nbytes)
    else:
        found = sampled_digests(addresses=addresses, nbytes=nbytes, seed=seed)
    return int(np.frombuffer(found[:DIGEST_BYTES], np.uint64)[0])
