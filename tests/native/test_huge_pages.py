"""Memory in use moves into huge pages without a trace; what can't be moved is an error and stays as it is."""

import errno
import threading

import numpy as np
import pytest
from huge_pages import huge_bytes, in_small_pages, move, needs_movable_memory, whole_pages
from native_helpers import memory_to_unmap

import native
from native import HUGE_PAGE_BYTES


@needs_movable_memory
def test_memory_is_in_huge_pages_afterwards_with_the_same_content() -> None:
    memory = in_small_pages(16 << 20)
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    before = memory.copy()
    address, nbytes = whole_pages(memory.ctypes.data, memory.nbytes)
    assert nbytes >= 12 << 20
    assert huge_bytes(address) < nbytes
    move(address, nbytes)
    assert huge_bytes(address) == nbytes
    assert np.array_equal(memory, before)
    # What is there already is no error.
    move(address, nbytes)


@needs_movable_memory
def test_a_thread_may_write_the_memory_meanwhile() -> None:
    memory = in_small_pages(64 << 20)
    # One number in each small page.
    counters = memory.view(np.uint64)[::512]
    counters[:] = 0
    moved = threading.Event()
    rounds = 0

    def count() -> None:
        nonlocal rounds
        while not moved.is_set():
            counters[:] += 1
            rounds += 1

    thread = threading.Thread(target=count)
    thread.start()
    address, nbytes = whole_pages(memory.ctypes.data, memory.nbytes)
    during = 0
    try:
        for page in range(address, address + nbytes, HUGE_PAGE_BYTES):
            begun = rounds
            move(page, HUGE_PAGE_BYTES)
            during += rounds - begun
    finally:
        moved.set()
        thread.join()
    assert during, "nothing was written while memory was moved"
    assert set(counters.tolist()) == {rounds}
    assert huge_bytes(address) == nbytes


def test_memory_that_is_gone_is_an_error() -> None:
    memory = memory_to_unmap()
    address, _ = whole_pages(np.frombuffer(memory, np.uint8).ctypes.data, 8 * HUGE_PAGE_BYTES)
    memory.close()
    with pytest.raises(OSError, match="huge pages") as failure:
        native.move_to_huge_pages(address=address, nbytes=HUGE_PAGE_BYTES)
    assert failure.value.errno in (errno.ENOMEM, errno.EINVAL)


@pytest.mark.parametrize("off", [(4096, 0), (0, 4096)])
def test_a_part_of_a_huge_page_is_an_error(off: tuple[int, int]) -> None:
    memory = in_small_pages(8 << 20)
    address, _ = whole_pages(memory.ctypes.data, memory.nbytes)
    with pytest.raises(OSError, match="huge pages") as failure:
        native.move_to_huge_pages(address=address + off[0], nbytes=HUGE_PAGE_BYTES + off[1])
    assert failure.value.errno == errno.EINVAL
