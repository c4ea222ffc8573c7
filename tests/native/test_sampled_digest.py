"""Sampled digests find what is promised: every change of small memory and of long ranges, and most scattered ones."""

import numpy as np
import pytest
from native_helpers import memory_to_unmap

import native

KIB = 1 << 10
LINE = 64


def digests(*arrays: np.ndarray, seed: int = 0) -> list[int]:
    found = native.sampled_digests(
        addresses=np.array([array.ctypes.data for array in arrays], np.uint64),
        nbytes=np.array([array.nbytes for array in arrays], np.uint64),
        seed=seed,
    )
    return np.frombuffer(found, np.uint64).tolist()


def random_bytes(nbytes: int, *, phase: int = 0) -> np.ndarray:
    """Return bytes whose address has the given phase within a cache line."""
    memory = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2 * LINE, dtype=np.uint8)
    begin = -memory.ctypes.data % LINE + phase
    return memory[begin : begin + nbytes]


@pytest.mark.parametrize("nbytes", [1, 2, 63, 64, 65, 1000, 4096])
@pytest.mark.parametrize("phase", [0, 4, 60])
def test_every_changed_byte_of_a_small_region_is_found(nbytes, phase):
    memory = random_bytes(nbytes, phase=phase)
    before = digests(memory)
    for at in range(nbytes):
        memory[at] ^= 1
        assert digests(memory) != before, at
        memory[at] ^= 1
    assert digests(memory) == before


@pytest.mark.parametrize("nbytes", [4097, 5000, 100 * KIB, 130 * KIB, 3 << 20])
@pytest.mark.parametrize("phase", [0, 4, 60])
def test_a_change_of_two_stretches_is_always_found(nbytes, phase):
    memory = random_bytes(nbytes, phase=phase)
    before = digests(memory)
    length = 2 * nbytes // max(16, nbytes // (8 * KIB)) + 2 * LINE
    for begin in np.linspace(0, nbytes - length, 40).astype(int):
        memory[begin : begin + length] ^= 1
        assert digests(memory) != before, begin
        memory[begin : begin + length] ^= 1
    assert digests(memory) == before


@pytest.mark.parametrize("nbytes", [4097, 5000, 3 << 20])
def test_the_first_and_the_last_bytes_are_always_read(nbytes):
    memory = random_bytes(nbytes, phase=12)
    before = digests(memory)
    for at in (0, LINE - 1, nbytes - LINE, nbytes - 1):
        memory[at] ^= 1
        assert digests(memory) != before, at
        memory[at] ^= 1


def test_scattered_changes_are_found_as_often_as_the_sample_says():
    """16 floats in each 8 KiB are read, so a clamp of 0.1 % of a MiB is found in 1 - 0.999 ** 2080 = 87 %."""
    memory = random_bytes(1 << 20).view(np.float32)
    original, found, rounds = memory.copy(), 0, 400
    random = np.random.default_rng(1)
    for seed in range(rounds):
        before = digests(memory, seed=seed)
        memory.view(np.uint32)[random.random(memory.size) < 0.001] ^= 1
        found += digests(memory, seed=seed) != before
        memory[:] = original
    assert 0.80 < found / rounds < 0.94


def test_another_seed_reads_other_places():
    memory = random_bytes(1 << 20)
    before = [digests(memory, seed=seed) for seed in range(200)]
    memory[500_000] ^= 1
    changed = sum(digests(memory, seed=seed) != before[seed] for seed in range(200))
    assert 0 < changed < 20


def test_regions_do_not_mix():
    arrays = [random_bytes(nbytes) for nbytes in (10, 5000, 0, 200 * KIB, 64)]
    before = digests(*arrays)
    assert before == [digests(array)[0] for array in arrays]
    arrays[3][:] = 0
    assert [now == then for now, then in zip(digests(*arrays), before, strict=True)] == [True, True, True, False, True]


def test_memory_that_is_unmapped_has_the_digest_zero():
    memory = memory_to_unmap()
    array = np.frombuffer(memory, np.uint8)
    address = array.ctypes.data
    del array
    memory.close()
    where = {"addresses": np.array([address], np.uint64), "nbytes": np.array([1 << 20], np.uint64)}
    assert native.sampled_digests(**where) == bytes(8)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="nbytes has 1 entries where addresses has 2"):
        native.sampled_digests(addresses=np.zeros(2, np.uint64), nbytes=np.zeros(1, np.uint64))


@pytest.mark.parametrize("nbytes", [0, 10, 4096, 4097, 130 * KIB, (3 << 20) + 17])
def test_equal_bytes_have_equal_digests_wherever_they_are(nbytes):
    """Runs and ranks are compared by these digests, and no two of them have their tensors at the same addresses."""
    one, other = random_bytes(nbytes), random_bytes(nbytes, phase=20)
    other[:] = one
    for seed in (0, 7, 2**40):
        assert digests(one, seed=seed) == digests(other, seed=seed)


def test_the_digests_on_disk_are_those_of_the_format():
    """The bytes are 0, 1, ..., 255, 0, 1, ...: these figures stand for every release that reads the format."""
    small, large = np.arange(1000).astype(np.uint8), np.arange(100_000).astype(np.uint8)
    assert [f"{one:016x}" for one in digests(small, large, seed=12)] == ["d33dd80b46f60e50", "e4316bc8a64f24dd"]
