"""Digests of tensors in device memory, computed where they are: equal ones mean equal bytes.

The memory is a vector of words of at most 32 bits, cut into rows of at most 65,536. The digest of a row is two sums
`x[0] * w[0] + x[1] * w[1] + ...` modulo 2**64, each with its own random 64-bit weights, which are always the same. Two
contents that were chosen without knowing the weights have an equal sum with a probability of at most 2**-33 (words
that differ at all differ by at most 31 trailing zero bits), so both of a row with at most 2**-66. Integers are added
without rounding: the order in which a device adds them changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from capture.devices.marks import CUDA_MARKS, Mark, behind
from capture.state.row_major import dense_bytes

__all__ = ["DeviceDigests", "Reading", "sample_of", "words_of"]

_ROW = 1 << 16
_MOST_ROWS = 128
"""Rows at once: their products take 64 MiB of the device's memory for a moment."""

_SAMPLED_WORDS = 1024
_SEED = 0x5EED_0F_D16E575


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The digests of some vectors as the device was told to compute them; it may not have done so yet."""

    sums: Sequence[torch.Tensor]
    computed: Sequence[Mark]
    owners: npt.NDArray[np.intp]
    vectors: int

    def rows(self) -> npt.NDArray[np.uint64]:
        """Wait, and return the two sums of every row, uint64 [rows, 2]. From any thread."""
        for mark in self.computed:
            mark.wait()
        found = [one.cpu().numpy() for one in self.sums]
        return np.concatenate(found or [np.zeros((2, 0), np.int64)], axis=1).T.view(np.uint64)

    def different(self, other: "Reading") -> npt.NDArray[np.bool_]:
        """Wait, and return for each vector whether `other`, of the same vectors, has found another content."""
        found = np.zeros(self.vectors, np.bool_)
        found[self.owners[(self.rows() != other.rows()).any(axis=1)]] = True
        return found

    def digests(self) -> list[bytes]:
        """Wait, and return the digest of each vector: that of all its rows, 16 bytes for each."""
        order = np.argsort(self.owners, kind="stable")
        rows = self.rows()[order]
        borders = np.searchsorted(self.owners[order], np.arange(self.vectors + 1))
        return [rows[begin:end].tobytes() for begin, end in pairwise(borders.tolist())]


class DeviceDigests:
    """Digests of these vectors of words, as often as they are read; it holds their memory."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._vectors = len(vectors)
        self._slabs: list[torch.Tensor] = []
        self._batches: list[_Batch] = []
        owners: list[int] = []
        rests: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, torch.Tensor]]] = {}
        for index, vector in enumerate(vectors):
            whole = len(vector) // _ROW
            rows = vector[: whole * _ROW].view(whole, _ROW)
            self._slabs += [rows[at : at + _MOST_ROWS] for at in range(0, whole, _MOST_ROWS)]
            owners += [index] * whole
            if whole * _ROW < len(vector):
                rest = vector[whole * _ROW :]
                width = 1 << (len(rest) - 1).bit_length()
                rests.setdefault((vector.device, vector.dtype, width), []).append((index, rest))
        for (_, _, width), group in rests.items():
            most = _MOST_ROWS * _ROW // width
            for at in range(0, len(group), most):
                batch = group[at : at + most]
                self._batches.append(_Batch([vector for _, vector in batch], width))
                owners += [index for index, _ in batch]
        self._owners = np.array(owners, np.intp)

    def read(self) -> Reading:
        """Let the devices compute the digests of what the memory holds after all work that the calling thread has given
        to them. Returns at once.
        """
        sums = [_sums(slab) for slab in self._slabs] + [batch.sums() for batch in self._batches]
        return Reading(sums, behind(sums, CUDA_MARKS), self._owners, self._vectors)


class _Batch:
    """Vectors shorter than a row, taken together, because each operation costs more than their bytes: as rows of
    `width` words, filled up with zeros. The digest of a vector does not depend on the others.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], width: int) -> None:
        zeros = torch.zeros(width, dtype=vectors[0].dtype, device=vectors[0].device)
        self._parts = [part for vector in vectors for part in (vector, zeros[len(vector) :])]
        self._width = width

    def sums(self) -> torch.Tensor:
        return _sums(torch.cat(self._parts).view(-1, self._width))


def words_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a dense tensor, in whatever order of its dimensions, as a vector of the widest words that
    fit; None when there is foreign memory between its elements.
    """
    if not dense_bytes(tensor):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    begin, size = flat.storage_offset() * flat.element_size(), flat.element_size()
    for words in (torch.int32, torch.int16):
        if size >= words.itemsize or (begin % words.itemsize == 0 and flat.nbytes % words.itemsize == 0):
            return flat.view(words)
    return flat.view(torch.int8)


def sample_of(words: torch.Tensor) -> torch.Tensor:
    """Return about a thousand words, spread evenly over a longer vector, whichever dimensions it is the memory of."""
    # An odd distance meets every column of a matrix whose rows are a power of two, or any even number, long.
    return words[:: (len(words) // _SAMPLED_WORDS) | 1]


def _sums(rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([(rows * weights).sum(1) for weights in _weights(rows.device)[:, : rows.shape[1]]])


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    # The generator is its own: the training's random numbers stay as they are. The copy has ended when `to` returns, so
    # every stream may read it.
    drawn = np.random.Generator(np.random.Philox(_SEED)).integers(0, 1 << 64, (2, _ROW), np.uint64)
    return torch.from_numpy(drawn.view(np.int64)).to(device)
