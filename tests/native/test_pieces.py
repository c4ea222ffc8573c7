"""Checksums of bytes that come in pieces, and copies of memory that may be gone."""

import errno

import numpy as np
import pytest
from native_helpers import memory_to_unmap

import native


@pytest.mark.parametrize("cuts", [[], [0], [1], [63, 64, 65], [240, 241, 1024], [5000]], ids=str)
def test_a_running_checksum_is_that_of_all_pieces_together(cuts):
    data = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8)
    running = native.RunningChecksum()
    assert running.end() == native.checksum(b"")
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        running.add(data[begin:end])
        assert running.end() == native.checksum(data[:end])


def test_a_copy_has_the_bytes_of_the_memory():
    memory = np.arange(1 << 20, dtype=np.uint32)
    into = np.zeros(len(memory) - 1, np.uint32)
    native.copy_memory(address=memory.ctypes.data + 4, into=into)
    assert np.array_equal(into, memory[1:])


def test_memory_that_is_gone_is_an_error_and_no_crash():
    memory = memory_to_unmap()
    address = np.frombuffer(memory, np.uint8).ctypes.data
    memory.close()
    with pytest.raises(OSError, match="no longer mapped") as refused:
        native.copy_memory(address=address, into=bytearray(1 << 16))
    assert refused.value.errno == errno.EFAULT


def test_a_buffer_that_can_not_be_written_to_is_refused():
    with pytest.raises(BufferError):
        native.copy_memory(address=0, into=b"constant")
