"""Byte planes and quads are what the format says, and arguments that do not fit are refused by value."""

import numpy as np
import pytest

import native

PLAIN, ROTATED, XOR, ROTATED_XOR, DIFFERENCE = range(5)


def split(data: np.ndarray, transform: int, base: np.ndarray | None = None) -> np.ndarray:
    """Return the planes as rows."""
    into = np.empty(data.nbytes, np.uint8)
    native.split_planes(data, into=into, itemsize=data.itemsize, transform=transform, base=base)
    return into.reshape(data.itemsize, data.size)


def test_planes_are_the_bytes_of_the_transformed_elements_the_least_significant_first():
    words = np.array([0x80112233, 0x00000001], np.uint32)
    base = np.array([0x80112230, 0x00000002], np.uint32)
    assert split(words, PLAIN).tolist() == [[0x33, 1], [0x22, 0], [0x11, 0], [0x80, 0]]
    assert split(words, ROTATED).tolist() == [[0x67, 2], [0x44, 0], [0x22, 0], [0x00, 0]]
    assert split(words, XOR, base).tolist() == [[3, 3], [0, 0], [0, 0], [0, 0]]
    assert split(words, ROTATED_XOR, base).tolist() == [[6, 6], [0, 0], [0, 0], [0, 0]]
    assert split(words, DIFFERENCE, base).tolist() == [[6, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("transform", range(5))
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_joined_planes_are_the_elements_again_at_any_address(dtype, transform, count):
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 256, 2 * (count + 1) * np.dtype(dtype).itemsize, dtype=np.uint8)
    data = memory[1 : 1 + count * np.dtype(dtype).itemsize].view(np.uint8)
    base = rng.permutation(data)
    planes = np.empty(data.nbytes, np.uint8)
    itemsize = np.dtype(dtype).itemsize
    native.split_planes(data, into=planes, itemsize=itemsize, transform=transform, base=base)
    found = np.empty(data.nbytes + 1, np.uint8)[1:]
    native.join_planes(list(planes.reshape(itemsize, count)), into=found, transform=transform, base=base)
    assert np.array_equal(found, data)


def by_definition(data: np.ndarray, transform: int, base: np.ndarray) -> np.ndarray:
    """Return the planes as rows, as docs/format.md defines them."""
    words, other = data.astype(object), base.astype(object)
    bits = 8 * data.itemsize
    if transform in (XOR, ROTATED_XOR):
        words = words ^ other
    if transform in (ROTATED, ROTATED_XOR):
        words = (words << 1 | words >> bits - 1) % (1 << bits)
    if transform == DIFFERENCE:
        signed = (words - other + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
        words = np.where(signed >= 0, 2 * signed, -2 * signed - 1)
    return np.array([(words >> 8 * plane) % 256 for plane in range(data.itemsize)], np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("transform", range(5))
def test_planes_are_those_of_the_definition(dtype, transform):
    rng = np.random.default_rng(11)
    for count in (1, 15, 33, 1100):
        data, base = (rng.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype) for _ in range(2))
        assert np.array_equal(split(data, transform, base), by_definition(data, transform, base))


def test_a_plane_of_one_byte_stands_for_all_of_them():
    high = bytes([7]) * 1500
    low = np.random.default_rng(1).integers(0, 256, 1500, np.uint8)
    whole, short = np.empty(3000, np.uint8), np.empty(3000, np.uint8)
    native.join_planes([low, high], into=whole, transform=ROTATED)
    native.join_planes([low, high[:1]], into=short, transform=ROTATED)
    assert np.array_equal(short, whole)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 8, 63, 64, 65, 1001])
@pytest.mark.parametrize("most", [2, 3, 255])
def test_quads_are_two_bits_a_byte_and_the_others_follow(count, most):
    plane = np.random.default_rng(count).integers(0, most + 1, count, dtype=np.uint8)
    quads, others = native.gather_quads(plane)
    padded = np.minimum(np.append(plane, np.zeros(-count % 4, np.uint8)), 3).reshape(-1, 4)
    assert quads == (padded << np.array([0, 2, 4, 6], np.uint8)).sum(axis=1).astype(np.uint8).tobytes()
    assert others == plane[plane > 2].tobytes()
    again = np.empty(count, np.uint8)
    assert native.spread_quads(quads, others=others, into=again) == len(others)
    assert np.array_equal(again, plane)
    if others:
        assert native.spread_quads(quads, others=others[1:], into=again) == len(others)


def test_what_planes_take_is_known_without_coding_them():
    rng = np.random.default_rng(2)
    words = rng.integers(0, 16, 20_000, dtype=np.uint16) + np.uint16(0x4000)
    low, high = native.coded_bytes(words, itemsize=2, transform=PLAIN)
    assert 9_900 < low < 10_100
    assert high == 0
    changed = words ^ (rng.random(20_000) < 0.5).astype(np.uint16)
    low, high = native.coded_bytes(changed, itemsize=2, transform=XOR, base=words)
    assert 2_400 < low < 2_600
    assert high == 0


def test_one_other_byte_makes_a_plane_no_constant():
    plane = bytearray(bytes([5]) * 1000)
    assert native.is_constant(plane)
    assert native.is_constant(b"")
    for at in (0, 1, 500, 999):
        plane[at] = 6
        assert not native.is_constant(plane)
        plane[at] = 5


def test_what_does_not_fit_is_refused():
    data, into = bytes(12), bytearray(12)
    with pytest.raises(ValueError, match="itemsize is 3"):
        native.split_planes(data, into=into, itemsize=3, transform=PLAIN)
    with pytest.raises(ValueError, match="no whole number of elements"):
        native.split_planes(data, into=into, itemsize=8, transform=PLAIN)
    with pytest.raises(ValueError, match="transform 5"):
        native.split_planes(data, into=into, itemsize=4, transform=5)
    with pytest.raises(ValueError, match="into has 8 entries where the data has 12"):
        native.split_planes(data, into=bytearray(8), itemsize=4, transform=PLAIN)
    with pytest.raises(ValueError, match="base has 8 entries where the data has 12"):
        native.split_planes(data, into=into, itemsize=4, transform=XOR, base=bytes(8))
    with pytest.raises(TypeError):
        native.split_planes(data, into=into, itemsize=4, transform=XOR)
    with pytest.raises(BufferError):
        native.split_planes(data, into=bytes(12), itemsize=4, transform=PLAIN)
    with pytest.raises(ValueError, match="a plane"):
        native.join_planes([bytes(3)] * 3 + [bytes(2)], into=into, transform=PLAIN)
    with pytest.raises(ValueError, match="itemsize is 3"):
        native.join_planes([bytes(4)] * 3, into=into, transform=PLAIN)
    with pytest.raises(ValueError, match="no whole number of elements"):
        native.coded_bytes(data, itemsize=8, transform=PLAIN)
    with pytest.raises(ValueError, match="quads has 2 entries where into, a fourth of it, has 3"):
        native.spread_quads(bytes(2), others=b"", into=into)
    with pytest.raises(BufferError):
        native.spread_quads(bytes(3), others=b"", into=data)


def some_blocks() -> list[tuple[np.ndarray, int]]:
    """Return buffers of floats, of any size, with the bytes of an element of each."""
    rng = np.random.default_rng(21)
    blocks = [(rng.standard_normal(count).astype(np.float32) * 1e-3, 4) for count in (0, 1, 5000, 70_000, 9, 262_144)]
    return [*blocks, (np.zeros(3000, np.uint16), 2), (rng.integers(0, 256, 1001, np.uint8), 8)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_blocks_that_threads_pack_are_those_that_one_packs_alone(threads):
    blocks = some_blocks()
    room = np.zeros(sum(data.nbytes + 11 + 9 * itemsize for data, itemsize in blocks), np.uint8)
    packer = native.ParallelPacker(threads=threads)
    for given in (blocks, blocks[::-1], []):
        found = packer.pack(given, into=room)
        expected = [native.pack_block(data, itemsize=itemsize, transforms=[0, 1]) for data, itemsize in given]
        assert room[: sum(size for size, _ in found)].tobytes() == b"".join(expected)
        assert found == [(len(block), native.checksum(block)) for block in expected]


def test_blocks_for_which_there_may_be_no_room_are_refused():
    data = np.zeros(1000, np.uint8)
    packer = native.ParallelPacker(threads=2)
    with pytest.raises(ValueError, match="into has 1046 bytes where the blocks may take 1047"):
        packer.pack([(data, 4)], into=bytearray(1046))
    assert packer.pack([(data, 4)], into=bytearray(1047))
    with pytest.raises(ValueError, match="itemsize is 3"):
        packer.pack([(data, 3)] * 9, into=bytearray(20_000))
    with pytest.raises(ValueError, match="threads is 0"):
        native.ParallelPacker(threads=0)
    with pytest.raises(ValueError, match="transforms is empty"):
        native.pack_block(data, itemsize=4, transforms=[])
    with pytest.raises(ValueError, match="base has 8 entries where the data has 1000"):
        native.pack_block(data, itemsize=4, transforms=[0, 2], base=bytes(8))
