"""Statistics equal float64 references, for every dtype and kernel, at any address and however a tensor is cut."""

import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_helpers import (
    COUNTS,
    DTYPES,
    KERNELS,
    assert_right,
    close,
    memory_of,
    merged,
    numbers_of,
    random_tensor,
)

import native
from catalog.format.dtypes import DTYPES as FORMAT_DTYPES

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 1023, 1024, 1025, 4096, 10_007)


def test_every_dtype_of_the_format_is_known() -> None:
    assert set(DTYPES) == set(FORMAT_DTYPES)
    for name, nbytes in FORMAT_DTYPES.items():
        assert native.statistics(bytes(nbytes * 3), name).count == 3


@each_kernel
@each_dtype
def test_random_bits_of_every_dtype(dtype: str, kernel: str) -> None:
    for count in LENGTHS:
        tensor = random_tensor(dtype, count, seed=count)
        assert_right(native.statistics(memory_of(tensor), dtype, kernel=kernel), tensor, what=(dtype, count))


@each_kernel
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "U16"])
def test_every_value_of_a_small_dtype_counts_for_itself(dtype: str, kernel: str) -> None:
    size = FORMAT_DTYPES[dtype]
    memory = np.arange(256**size, dtype=f"<u{size}").view(np.uint8)
    numbers = numbers_of(torch.from_numpy(memory.copy()).view(DTYPES[dtype]))
    for index in range(0, numbers.size, 1 if size == 1 else 251):
        found = native.statistics(memory[index * size : (index + 1) * size], dtype, kernel=kernel, buckets=0)
        number = numbers[index]
        assert (found.min is None) == (found.nan == 1) == bool(np.isnan(number)), index
        assert found.inf == np.isinf(number), index
        if not np.isnan(number):
            assert found.min == found.max == number, index
        assert found.sum == (number if np.isfinite(number) else 0.0), index


@each_kernel
@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F16"])
@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0])
def test_one_special_value_anywhere(dtype: str, special: float, kernel: str) -> None:
    for place in range(50):
        tensor = torch.linspace(0.5, 2.0, 50).to(DTYPES[dtype])
        tensor[place] = special
        found = native.statistics(memory_of(tensor), dtype, start=5, kernel=kernel)
        assert_right(found, tensor, what=place)
        without = tensor.clone()
        without[place] = 0
        assert np.array_equal(found.sketch, native.statistics(memory_of(without), dtype, start=5, kernel=kernel).sketch)


@each_kernel
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 0.0])
def test_nothing_but_one_special_value(special: float, kernel: str) -> None:
    for count in (1, 16, 40):
        tensor = torch.full((count,), special)
        found = native.statistics(memory_of(tensor), "F32", kernel=kernel)
        assert_right(found, tensor, what=count)
        assert not found.sketch.any()
        assert not np.signbit(found.sketch).any()


@each_kernel
def test_zero_has_no_sign_in_min_and_max(kernel: str) -> None:
    for values in ([0.0, -0.0], [-0.0, 0.0], [-0.0] * 16, [-0.0] * 40):
        found = native.statistics(np.array(values), "F64", kernel=kernel)
        assert found.min is not None
        assert found.max is not None
        assert not np.signbit([found.min, found.max]).any()


@each_kernel
@pytest.mark.parametrize(("dtype", "smallest"), [("F64", 5e-324), ("F32", 1.4e-45), ("F16", 6e-8), ("BF16", 9.2e-41)])
def test_denormals_count_also_where_the_thread_flushes_them(dtype: str, smallest: float, kernel: str) -> None:
    tensor = torch.full((40,), smallest, dtype=torch.float64).to(DTYPES[dtype])
    exact = numbers_of(tensor)[0]
    assert exact > 0
    memory = memory_of(tensor)
    found: list[native.Statistics] = []

    def flushing() -> None:
        assert torch.set_flush_denormal(True)
        found.append(native.statistics(memory, dtype, kernel=kernel, start=3))
        assert torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0.0

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert found[0].zeros == 0
    assert found[0].min == found[0].max == exact
    assert found[0].exponents.sum() == 40
    assert found[0].sum == pytest.approx(40 * exact, rel=1e-12)


@each_kernel
def test_exponents_are_powers_of_two_clamped_at_both_ends(kernel: str) -> None:
    for power in range(-1074, 1024):
        for factor in (1.0, -1.0, 1.75):
            number = np.array([factor * 2.0**power])
            if number[0] == 0 or (power < -1022 and factor == 1.75):
                continue
            found = native.statistics(number, "F64", kernel=kernel, buckets=0).exponents
            assert np.flatnonzero(found).tolist() == [min(max(power + 52, 0), 63)], power


@each_kernel
def test_squares_beyond_float64_are_infinite(kernel: str) -> None:
    found = native.statistics(np.full(20, 1e200), "F64", kernel=kernel)
    assert found.sum_of_squares == np.inf
    assert found.sum == pytest.approx(2e201)
    assert found.inf == 0


def test_more_elements_than_the_pairs_are_emptied_after() -> None:
    once, times = np.arange(256, dtype=np.uint8), (35 << 20) // 256
    expected = native.statistics(once, "U8").exponents * np.uint64(times)
    for kernel in KERNELS:
        found = native.statistics(np.tile(once, times), "U8", kernel=kernel, start=7, buckets=0)
        assert np.array_equal(found.exponents, expected)
        assert found.zeros == times


@each_dtype
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "portable"])
def test_a_fast_kernel_equals_the_portable_one(dtype: str, kernel: str) -> None:
    tensor = random_tensor(dtype, 20_011, seed=1)
    fast, portable = (
        native.statistics(memory_of(tensor), dtype, start=1_000_003, key=9, kernel=one) for one in (kernel, "portable")
    )
    assert [getattr(fast, name) for name in COUNTS] == [getattr(portable, name) for name in COUNTS]
    assert np.array_equal(fast.exponents, portable.exponents)
    numbers = numbers_of(tensor)
    close(fast.sum, numbers[np.isfinite(numbers)])
    assert np.allclose(fast.sketch, portable.sketch, rtol=1e-9, atol=1e-12 * np.abs(portable.sketch).max())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tensor_cut_anywhere_merges_to_the_same(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    kernel = data.draw(st.sampled_from(KERNELS))
    count = data.draw(st.integers(0, 5_000))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=8)))
    start = data.draw(st.integers(0, 2**40))
    tensor = random_tensor(dtype, count, seed=count)
    if dtype in ("F64", "F32", "BF16"):
        tensor = torch.where(tensor.abs() > 1e30, torch.ones_like(tensor), tensor)
    bounds = [0, *cuts, count]
    whole = native.statistics(memory_of(tensor), dtype, start=start, key=3, kernel=kernel)
    parts = [
        native.statistics(memory_of(tensor[a:b]), dtype, start=start + a, key=3, kernel=kernel)
        for a, b in pairwise(bounds)
    ]
    found = merged(parts)
    assert {name: found[name] for name in COUNTS} == {name: getattr(whole, name) for name in COUNTS}
    assert np.array_equal(found["exponents"], whole.exponents)
    numbers = numbers_of(tensor)
    finite = numbers[np.isfinite(numbers)]
    close(found["sum"], finite)
    close(found["sum_of_squares"], finite * finite)
    assert np.allclose(found["sketch"], whole.sketch, rtol=0, atol=1e-13 * np.abs(finite).sum() + 1e-300)


@each_kernel
@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "I16"])
def test_bytes_at_any_address(dtype: str, kernel: str) -> None:
    tensor = random_tensor(dtype, 3_000, seed=2)
    memory = memory_of(tensor)
    arena = np.zeros(memory.size + 64, np.uint8)
    for shift in range(0, 64, 7):
        arena[shift : shift + memory.size] = memory
        found = native.statistics(arena[shift : shift + memory.size], dtype, kernel=kernel)
        assert_right(found, tensor, what=shift)


def test_bytes_outside_the_tensor_do_not_count() -> None:
    for count in range(40):
        arena = np.full(120, np.nan, np.float32)
        arena[40 : 40 + count] = 1.0
        for start in range(17):
            found = native.statistics(arena[40 : 40 + count], "F32", start=start)
            assert (found.nan, found.sum, found.count) == (0, count, count)


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.float32).reshape(4, 5)]
)
def test_any_contiguous_buffer(make) -> None:
    data = np.arange(20, dtype=np.float32)
    assert native.statistics(make(data.tobytes()), "F32").sum == 190


def test_arrays_outlive_their_statistics_and_are_read_only() -> None:
    sketch = native.statistics(np.ones(1000), "F64").sketch
    exponents = native.statistics(np.ones(1000), "F64").exponents
    assert exponents[52] == exponents.sum() == 1000
    assert sketch.any()
    assert sketch.shape == (256,)
    for array in (sketch, exponents):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_interpreter_goes_on_meanwhile() -> None:
    """A thread that only Python's switching could hold up gets its turn before the call returns."""
    memory = np.zeros(512 << 20, np.uint8)
    begun, beside = threading.Event(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)

    def thread() -> None:
        begun.set()
        native.statistics(memory, "U8", kernel="portable")
        beside.append("done")

    try:
        worker = threading.Thread(target=thread)
        worker.start()
        begun.wait()
        beside.append("here")
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert beside == ["here", "done"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F33"}, "dtype F33 is not one of F64, F32, BF16"),
        ({"dtype": "f32"}, "dtype f32 is not one of"),
        ({"data": bytes(7)}, "data has 7 bytes, no multiple of the 4 that an element of F32 has"),
        ({"buckets": 8}, "buckets is 8 but must be 0 or a power of two from 16 to 1048576"),
        ({"buckets": 48}, "buckets is 48 but"),
        ({"buckets": 1 << 21}, "buckets is 2097152 but"),
        ({"start": 2**64 - 1}, "start 18446744073709551615 and 2 elements reach beyond"),
        ({"kernel": "mmx"}, "kernel mmx is not one of those that run here: .*portable"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"data": bytes(8), "dtype": "F32", "start": 0, "buckets": 16, "kernel": ""} | change
    with pytest.raises(ValueError, match=message):
        native.statistics(arguments.pop("data"), arguments.pop("dtype"), **arguments)


@pytest.mark.parametrize("data", ["text", 5, np.zeros((4, 4))[:, ::2]])
def test_a_buffer_that_is_not_contiguous_is_refused(data: object) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.statistics(data, "U8")


def test_kernels_end_with_the_portable_one() -> None:
    assert KERNELS[-1] == "portable"
    assert len(set(KERNELS)) == len(KERNELS)
