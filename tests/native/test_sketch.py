"""The sketch is the one that docs/sketches.md specifies, and its estimates keep the bound stated there."""

import re

import numpy as np
import pytest
from sketch_states import COLUMN, ROW, TOKENS, UNITS, WIDTH, share, trained
from statistics_helpers import KERNELS, SPECIFICATION, specified

import native

KEYS = [0x9E3779B97F4A7C15 * index % 2**64 for index in range(2_000)]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
each_state = pytest.mark.parametrize(
    "name", ["tokens.weight", "column.weight", "row.weight", "spread.weight", "spread.weight momentum"]
)


def sketches(values: np.ndarray, buckets: int) -> np.ndarray:
    """Return one sketch per key, as float64 [keys, buckets]."""
    memory = values.astype(np.float64)
    return np.stack([native.statistics(memory, "F64", key=key, buckets=buckets).sketch for key in KEYS])


def update_sketches(name: str, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimate the change of a tensor in each half of a training, from the sketches of steps alone."""
    first, second, third = (sketches(values, buckets) for values in trained()[name].steps)
    return second - first, third - second


def updates(name: str) -> tuple[np.ndarray, np.ndarray]:
    first, second, third = (values.astype(np.float64) for values in trained()[name].steps)
    return second - first, third - second


@each_kernel
@pytest.mark.parametrize("buckets", [16, 64, 256, 65536, 1 << 20])
def test_the_kernel_makes_the_sketch_that_is_specified(buckets: int, kernel: str) -> None:
    sketch = specified()["sketch"]
    random = np.random.default_rng(0)
    for start in (0, 1, 15, 16, 1_000, 1_023, 2**33 + 5, 2**63 + 11):
        for count in (0, 1, 15, 17, 300, 5_000):
            key = int(random.integers(0, 2**64, dtype=np.uint64))
            values = random.standard_normal(count)
            found = native.statistics(values, "F64", start=start, key=key, buckets=buckets, kernel=kernel).sketch
            expected = sketch(values, start=start, key=key, buckets=buckets)
            assert np.allclose(found, expected, rtol=0, atol=1e-13), (start, count)


def test_the_examples_of_the_specification_hold() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([+-]1) \|$", SPECIFICATION, re.MULTILINE)
    assert len(rows) == 6
    for key, index, bucket, sign in rows:
        found = native.statistics(np.ones(1), "F64", start=int(index), key=int(key), buckets=256).sketch
        assert np.flatnonzero(found).tolist() == [int(bucket)]
        assert found[int(bucket)] == int(sign)


def test_no_buckets_no_sketch() -> None:
    found = native.statistics(np.ones(100), "F64", buckets=0)
    assert found.sketch.shape == (0,)
    assert found.sum == 100


def test_halves_added_equal_the_sketch_of_half_the_size() -> None:
    values = np.random.default_rng(1).standard_normal(5_000)
    wide, narrow = (native.statistics(values, "F64", key=5, buckets=buckets).sketch for buckets in (256, 128))
    assert np.allclose(wide[:128] + wide[128:], narrow, rtol=0, atol=1e-12)


@each_kernel
def test_sixteen_elements_are_exact(kernel: str) -> None:
    values = np.random.default_rng(2).standard_normal(16)
    for key in KEYS[:100]:
        for count in (1, 7, 16):
            found = native.statistics(values[:count], "F64", key=key, buckets=16, kernel=kernel).sketch
            assert np.square(found).sum() == pytest.approx(np.square(values[:count]).sum(), rel=1e-14)


def test_signs_buckets_and_keys_are_spread_evenly() -> None:
    """Every pair of indices, near or far, shares a bucket about as often as chance predicts, and signs show no bias."""
    placed = specified()["placed"]
    keys = [int(key) for key in np.random.default_rng(3).integers(0, 2**64, 20_000, dtype=np.uint64)]
    index = np.array([0, 1, 15, 16, 17, 32, 33, 1024, 4096, 10**9], np.uint64)
    buckets, signs = (np.array(column) for column in zip(*(placed(index, key, 64) for key in keys), strict=True))
    for a in range(len(index)):
        for b in range(a):
            meets = (buckets[:, a] == buckets[:, b]).mean()
            expected = 0.0 if index[a] >> 4 == index[b] >> 4 else 1 / 64
            assert abs(meets - expected) < 5 * (expected / len(keys)) ** 0.5 + 1e-12, (index[a], index[b])
            assert abs((signs[:, a] * signs[:, b]).mean()) < 5 / len(keys) ** 0.5, (index[a], index[b])


def test_the_training_has_the_intended_updates() -> None:
    tokens, column, row, spread = (updates(f"{name}.weight")[0] for name in ("tokens", "column", "row", "spread"))
    assert (tokens.reshape(TOKENS, WIDTH) != 0).any(axis=1).sum() <= 40
    assert share(column, column.reshape(UNITS, WIDTH)[:, COLUMN]) > 0.9
    assert share(row, row.reshape(UNITS, UNITS)[ROW]) > 0.9
    assert np.square(spread).max() < 0.02 * np.square(spread).sum()


@each_state
@pytest.mark.parametrize("buckets", [64, 256, 1024])
def test_distances_and_norms_keep_their_bound(name: str, buckets: int) -> None:
    whole = trained()[name].steps[2].astype(np.float64)
    assert_norm_keeps_its_bound(sketches(whole, buckets), whole)
    for found, exact in zip(update_sketches(name, buckets), updates(name), strict=True):
        assert_norm_keeps_its_bound(found, exact)


def assert_norm_keeps_its_bound(found: np.ndarray, exact: np.ndarray) -> None:
    buckets = found.shape[1]
    ratios = np.square(found).sum(axis=1) / np.square(exact).sum()
    deviation = np.sqrt(2 / buckets)
    assert np.sqrt(np.square(ratios - 1).mean()) < 1.15 * deviation
    assert abs(ratios.mean() - 1) < 4 * deviation / len(ratios) ** 0.5
    bound = 2.5 * deviation
    within = (ratios <= 1 + bound) & (ratios >= 1 - bound)
    assert within.mean() >= 0.95


@each_state
@pytest.mark.parametrize("buckets", [64, 256, 1024])
def test_inner_products_and_cosines_keep_their_bound(name: str, buckets: int) -> None:
    exact = updates(name)
    assert_cosine_keeps_its_bound(update_sketches(name, buckets), exact)
    shuffled = np.random.default_rng(4).permutation(exact[1])
    assert_cosine_keeps_its_bound((sketches(exact[0], buckets), sketches(shuffled, buckets)), (exact[0], shuffled))


def assert_cosine_keeps_its_bound(found: tuple[np.ndarray, np.ndarray], exact: tuple[np.ndarray, np.ndarray]) -> None:
    buckets = found[0].shape[1]
    norms = [np.square(one).sum(axis=1) for one in found]
    products = (found[0] * found[1]).sum(axis=1)
    bounds = 2.5 * np.sqrt((norms[0] * norms[1] + products**2) / buckets)
    assert (np.abs(products - exact[0] @ exact[1]) <= bounds).mean() >= 0.95
    cosine = exact[0] @ exact[1] / np.sqrt((exact[0] @ exact[0]) * (exact[1] @ exact[1]))
    cosines = products / np.sqrt(norms[0] * norms[1])
    assert (np.abs(cosines - cosine) <= 2.5 * (1 - cosines**2) / np.sqrt(buckets)).mean() >= 0.95
    assert np.sqrt(np.square(cosines - cosine).mean()) < 1.2 * (1 - cosine**2) / np.sqrt(buckets) + 1 / buckets


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_elements_have_the_variance_that_is_stated(count: int) -> None:
    """The estimate is not normal: nearly always exact and rarely far off, so the squares are summed over many keys."""
    exact = np.zeros(4_000)
    exact[np.arange(count) * 1_024 + 7] = 1.0
    found = sketches(exact, 64)
    ratios = np.square(found).sum(axis=1) / count
    assert np.square(ratios - 1).mean() <= 1.5 * 2 / 64
    assert (np.abs(ratios - 1) <= 2.5 * np.sqrt(2 / 64)).mean() >= 0.95


def test_sums_over_tensors_equal_sketches_of_the_whole() -> None:
    tensors = [updates(name)[0] for name in ("column.weight", "row.weight", "spread.weight")]
    sums = np.zeros((len(KEYS), 256))
    for number, tensor in enumerate(tensors):
        sums += np.roll(sketches(tensor, 256), number * 7, axis=0)
    assert_norm_keeps_its_bound(sums, np.concatenate(tensors))


def test_without_the_turn_a_dominant_column_would_break_the_bound() -> None:
    block = re.search(r"```python\n(.*?)```", SPECIFICATION, re.DOTALL)
    assert block is not None
    names: dict[str, object] = {}
    exec(block[1].replace("lane ^ turn", "lane"), names)
    exact = updates("column.weight")[0]
    found = np.stack([names["sketch"](exact, start=0, key=key, buckets=256) for key in KEYS])  # type: ignore[operator]
    with pytest.raises(AssertionError):
        assert_norm_keeps_its_bound(found, exact)
