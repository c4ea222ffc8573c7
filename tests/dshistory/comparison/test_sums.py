"""The arithmetic of a diff equals plain float64 references."""

import math

import pytest
import torch

from dshistory.comparison.sums import CHUNK_NUMEL, Comparison


def compare(before: torch.Tensor, after: torch.Tensor) -> Comparison:
    comparison = Comparison()
    comparison.add(before, after)
    return comparison


def check(before: torch.Tensor, after: torch.Tensor) -> None:
    """Compare every number with a plain one over whole float64 tensors."""
    got = compare(before, after)
    a, b = before.double(), after.double()
    both = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    assert got.nonfinite_before == int((~a.isfinite()).sum())
    assert got.nonfinite_after == int((~b.isfinite()).sum())
    assert got.changed_share == pytest.approx(float((~same).double().mean()) if a.numel() else 0.0, abs=0)
    a, b = a[both], b[both]
    assert got.sign_flips == int((a.sign() * b.sign() == -1).sum())
    assert got.norm_before == pytest.approx(float(a.norm()), rel=1e-12)
    assert got.norm_after == pytest.approx(float(b.norm()), rel=1e-12)
    assert got.update_norm == pytest.approx(float((b - a).norm()), rel=1e-12)
    assert got.max_change == (float((b - a).abs().max()) if a.numel() else 0.0)
    if a.norm() and b.norm():
        assert got.cosine == pytest.approx(float(a.dot(b) / (a.norm() * b.norm())), abs=1e-12)
        assert got.relative_update == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_floats_against_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1000, generator=generator)
    check(before.to(dtype), (before + 0.1 * torch.randn(1000, generator=generator)).to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_whole_numbers_against_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randint(0, 100, (2, 1000), generator=generator)
    check(before.to(dtype), after.to(dtype))


def test_int64_beyond_the_precision_of_float64() -> None:
    before = torch.tensor([2**62, -(2**62), 2**63 - 1, 5])
    got = compare(before, before + torch.tensor([1, 1, 0, 0]))
    assert (got.changed, got.max_change, got.update_norm) == (2, 1.0, math.sqrt(2))


def test_booleans() -> None:
    got = compare(torch.tensor([True, False, True]), torch.tensor([True, True, False]))
    assert (got.changed, got.max_change) == (2, 1.0)


def test_one_element() -> None:
    got = compare(torch.tensor([2.0]), torch.tensor([-1.0]))
    assert (got.update_norm, got.relative_update, got.cosine, got.sign_flips, got.changed_share) == (
        3.0,
        1.5,
        -1.0,
        1,
        1.0,
    )


def test_empty() -> None:
    got = compare(torch.empty(0), torch.empty(0))
    assert (got.update_norm, got.relative_update, got.cosine, got.changed_share) == (0.0, 0.0, None, 0.0)


def test_out_of_zero_is_an_infinite_relative_update() -> None:
    got = compare(torch.zeros(3), torch.ones(3))
    assert got.relative_update == math.inf
    assert got.cosine is None
    assert compare(torch.zeros(3), torch.zeros(3)).relative_update == 0.0


def test_nan_and_infinity_are_counted_and_left_out() -> None:
    nan, inf = math.nan, math.inf
    before = torch.tensor([1.0, 2.0, nan, nan, inf, inf, 3.0, 4.0])
    after = torch.tensor([1.5, nan, nan, 1.0, inf, -inf, inf, 4.0])
    check(before, after)
    got = compare(before, after)
    assert (got.nonfinite_before, got.nonfinite_after, got.changed, got.max_change) == (4, 5, 5, 0.5)


def test_denormals_are_changes() -> None:
    check(torch.tensor([1e-45, 0.0, 1e-40]), torch.tensor([2.8e-45, 1e-45, -1e-40]))


def test_negative_zero_equals_zero() -> None:
    got = compare(torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0]))
    assert (got.changed, got.sign_flips) == (0, 0)


def test_two_dtypes_are_compared_by_value() -> None:
    check(torch.tensor([1.0, 2.5, 3.1]), torch.tensor([1.0, 2.5, 3.1]).bfloat16())


def test_more_than_one_chunk() -> None:
    before = torch.zeros(CHUNK_NUMEL + 3, dtype=torch.bfloat16)
    after = before.clone()
    after[-1], after[0] = math.nan, 2.0
    got = compare(before, after)
    assert (got.numel, got.changed, got.nonfinite_after, got.update_norm) == (CHUNK_NUMEL + 3, 2, 1, 2.0)
