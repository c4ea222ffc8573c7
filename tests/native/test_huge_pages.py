"""Memory in use moves into huge pages without anybody's notice; what can't be moved is an error and stays as it is."""

import errno
import threading

import numpy as np
import pytest
from huge_pages import HUGE_PAGE, huge_bytes, in_small_pages, needs_movable_memory, whole_pages
from native_helpers import memory_to_unmap

import native


@needs_movable_memory
def test_memory_is_in_huge_pages_afterwards_with_the_same_content() -> None:
    memory = in_small_pages(16 << 20)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    before = memory.copy()
    address, nbytes = whole_pages(memory.ctypes.data, memory.nbytes)
    in_huge_pages = huge_bytes(address)
    native.move_to_huge_pages(address=address, nbytes=nbytes)
    assert nbytes >= 12 << 20
    assert huge_bytes(address) - in_huge_pages == nbytes
    assert np.array_equal(memory, before)


@needs_movable_memory
def test_a_thread_may_write_the_memory_meanwhile() -> None:
    memory = in_small_pages(32 << 20)
    # One number in each small page.
    counters = memory.view(np.uint64)[::512]
    counters[:] = 0
    address, nbytes = whole_pages(memory.ctypes.data, memory.nbytes)
    in_huge_pages = huge_bytes(address)
    moved = threading.Event()
    rounds = 0

    def count() -> None:
        nonlocal rounds
        while not moved.is_set():
            counters[:] += 1
            rounds += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        native.move_to_huge_pages(address=address, nbytes=nbytes)
    finally:
        moved.set()
        thread.join()
    assert rounds
    assert set(counters.tolist()) == {rounds}
    assert huge_bytes(address) - in_huge_pages == nbytes


def test_memory_that_is_gone_is_an_error() -> None:
    memory = memory_to_unmap()
    address, _ = whole_pages(np.frombuffer(memory, np.uint8).ctypes.data, 8 * HUGE_PAGE)
    memory.close()
    with pytest.raises(OSError, match="huge pages") as failure:
        native.move_to_huge_pages(address=address, nbytes=HUGE_PAGE)
    assert failure.value.errno in (errno.ENOMEM, errno.EINVAL)


def test_an_address_within_a_huge_page_is_an_error() -> None:
    with pytest.raises(OSError, match="huge pages") as failure:
        native.move_to_huge_pages(address=HUGE_PAGE + 1, nbytes=HUGE_PAGE)
    assert failure.value.errno == errno.EINVAL
