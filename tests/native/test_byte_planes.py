"""Byte planes are where docs and codec say they are, and arguments that do not fit are refused by value."""

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
