"""Compares low-precision weights with their float32 masters where a device has the weights: are they these, rounded as
docs/format.md defines it, to the last bit?

A device rounds as it does; that it does so as the format wants is found out once, from numbers around every border.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

import native
from capture.devices.digests import sample_of
from capture.state.dtypes import dtype_name

__all__ = ["are_rounded", "rounds_as_defined", "samples_are_rounded"]

_NAN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

_BORDERS = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xE000, 0xFFFF]
"""Lower halves of float32 numbers: those beside the middles between two numbers of both dtypes."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Weights and their masters, vectors of as many elements."""


def are_rounded(weights: torch.Tensor, masters: torch.Tensor) -> torch.Tensor:
    """Return, as one bool on the device of both, whether every one of `weights` has the bits of its master, rounded."""
    return (_rounded(masters, weights.dtype) == weights.view(torch.int16)).all()


def samples_are_rounded(pairs: Sequence[Pair]) -> list[bool]:
    """Return for each pair whether this holds for about a thousand elements, spread evenly. It waits for the devices,
    once for all pairs of the same dtype on the same devices.
    """
    groups: dict[tuple[torch.dtype, torch.device, torch.device], list[int]] = {}
    for index, (weights, masters) in enumerate(pairs):
        groups.setdefault((weights.dtype, weights.device, masters.device), []).append(index)
    found = np.ones(len(pairs), np.bool_)
    for (dtype, _, home), indices in groups.items():
        samples = [sample_of(pairs[index][0]) for index in indices]
        masters = torch.cat([sample_of(pairs[index][1]) for index in indices])
        sampled = torch.cat(samples).to(home)
        differs = (_rounded(masters, dtype) != sampled.view(torch.int16)).cpu().numpy()
        owners = np.repeat(indices, [len(sample) for sample in samples])
        found[owners[differs]] = False
    return found.tolist()


@lru_cache(maxsize=16)
def rounds_as_defined(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this device rounds float32 numbers to `dtype`, bfloat16 or float16, as the format defines it: some
    of each sign and exponent, those beside each border among them. It is asked once, and waits for the device.
    """
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    numbers = (upper | np.array(_BORDERS, np.uint32)).ravel()
    expected = np.empty(len(numbers), np.int16)
    native.round_memory(
        address=numbers.ctypes.data,
        target=expected.ctypes.data,
        numel=len(numbers),
        dtype=dtype_name(dtype, what="weights"),
    )
    found = _rounded(torch.from_numpy(numbers.view(np.float32)).to(device), dtype)
    return bool(np.array_equal(found.cpu().numpy(), expected))


def _rounded(masters: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of the numbers, rounded, as int16: all NaN are one."""
    return masters.to(dtype).view(torch.int16).masked_fill_(masters.isnan(), _NAN[dtype])
