"""References for statistics and sketches: float64 results from numpy, and the code of the specification."""

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from places import ROOT

import native

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
KERNELS = native.statistics_kernels()
COUNTS = ("count", "nan", "inf", "zeros", "min", "max")
SPECIFICATION = (ROOT / "docs" / "sketches.md").read_text(encoding="utf-8")


def specified() -> dict[str, Callable[..., Any]]:
    """Return the functions of the specification's code block."""
    block = re.search(r"```python\n(.*?)```", SPECIFICATION, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    """Return every element as float64, converted by torch (by numpy for uint64, which torch can't convert)."""
    flat = tensor.flatten()
    return flat.numpy().astype(np.float64) if flat.dtype == torch.uint64 else flat.to(torch.float64).numpy()


def random_tensor(dtype: str, count: int, *, seed: int = 0) -> torch.Tensor:
    """Return random bits as a tensor.

    It has every exponent whose squares float64 can add, denormals, zeros, and NaN and Inf where the dtype has them.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    bits = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    if dtype == "BOOL":
        return bits < 100
    tensor = bits.view(DTYPES[dtype])
    if dtype == "F64":
        tensor = torch.where(tensor.isfinite() & (tensor.abs() > 1e150), torch.ones_like(tensor), tensor)
    return torch.where(torch.rand(count, generator=generator) < 0.1, torch.zeros_like(tensor), tensor)


def assert_right(found: native.Statistics, tensor: torch.Tensor, *, what: object = "") -> None:
    """Assert that counts are exact, and sums correct within the rounding of additions in any order."""
    numbers = numbers_of(tensor)
    finite = numbers[np.isfinite(numbers)]
    comparable = numbers[~np.isnan(numbers)]
    assert found.count == numbers.size, what
    assert found.nan == np.isnan(numbers).sum(), what
    assert found.inf == np.isinf(numbers).sum(), what
    assert found.zeros == (numbers == 0).sum(), what
    assert found.min == (comparable.min() if comparable.size else None), what
    assert found.max == (comparable.max() if comparable.size else None), what
    assert np.array_equal(found.exponents, exponents(finite)), what
    close(found.sum, finite, what)
    close(found.sum_of_squares, finite * finite, what)
    assert found.checksum == native.checksum(memory_of(tensor)), what


def close(found: float, addends: np.ndarray, what: object = "") -> None:
    """Assert that a sum is correct within the rounding of additions in any order."""
    assert abs(found - addends.sum()) <= 1e-15 * max(64, addends.size) ** 0.5 * np.abs(addends).sum(), what


def exponents(finite: np.ndarray) -> np.ndarray:
    _, above = np.frexp(finite[finite != 0])
    return np.bincount(np.clip(above - 1 + 52, 0, 63), minlength=64)


def merged(parts: Sequence[native.Statistics]) -> dict[str, Any]:
    """Merge statistics by the rules of the specification's table."""
    least = [part.min for part in parts if part.min is not None]
    most = [part.max for part in parts if part.max is not None]
    added = ("count", "nan", "inf", "zeros", "sum", "sum_of_squares", "exponents", "sketch")
    return {
        **{name: reduce(lambda a, b: a + b, [getattr(part, name) for part in parts]) for name in added},
        "min": min(least, default=None),
        "max": max(most, default=None),
    }
