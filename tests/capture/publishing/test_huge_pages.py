"""What snapshots read is moved into huge pages: only what stays, at a small share of a core, and without a trace."""

import math
import time

import numpy as np
import pytest
from capture_helpers import assert_same, make, one_step, reference
from huge_pages import HUGE_PAGE, huge_bytes, needs_movable_memory

import capture
from capture.publishing import huge_pages
from capture.publishing.huge_pages import PIECE_BYTES, HugePages, huge_page_setting

BASE = 64 * HUGE_PAGE


class Kernel:
    """Notes what it is to move, and fails for the addresses in `pinned`."""

    def __init__(self):
        self.asked = []
        self.pinned = set()
        self.takes_s = 0.0

    def move(self, *, address, nbytes):
        self.asked.append((address, nbytes))
        until = time.thread_time() + self.takes_s
        while time.thread_time() < until:
            pass
        if address in self.pinned:
            raise OSError("a device has pinned a page")


def regions(*pairs):
    return [np.array(column, np.uint64) for column in zip(*pairs, strict=True)]


def moved(pages, kernel):
    """Return what is moved now, all of it, in order."""
    kernel.asked.clear()
    while pages.due_s() < math.inf:
        time.sleep(max(0.0, pages.due_s()))
        pages.move_when_due()
    return sorted(kernel.asked)


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def pages(kernel):
    return HugePages(setting="madvise", move=kernel.move)


def test_whole_huge_pages_are_moved_of_memory_that_two_snapshots_have_read(pages, kernel):
    # In any order, and with malloc's own words between them; the last one is alone and too small.
    read = regions(
        (BASE + HUGE_PAGE + 64, 3 * HUGE_PAGE), (BASE + 16, HUGE_PAGE), (BASE + 9 * HUGE_PAGE, HUGE_PAGE - 1)
    )
    pages.snapshot_read(*read)
    assert moved(pages, kernel) == []
    pages.snapshot_read(*read)
    assert moved(pages, kernel) == [(BASE + HUGE_PAGE, 3 * HUGE_PAGE)]
    pages.snapshot_read(*read)
    assert moved(pages, kernel) == []


def test_memory_of_one_step_is_left_alone_and_new_memory_that_stays_is_moved(pages, kernel):
    staying, passing, coming = ((BASE + i * PIECE_BYTES, HUGE_PAGE) for i in range(3))
    pages.snapshot_read(*regions(staying, passing))
    pages.snapshot_read(*regions(staying, coming))
    assert moved(pages, kernel) == [staying]
    pages.snapshot_read(*regions(staying, coming))
    assert moved(pages, kernel) == [staying, coming]


def test_much_memory_is_moved_in_pieces_that_take_a_small_share_of_a_core(pages, kernel):
    kernel.takes_s = 0.002
    read = regions((BASE, 2 * PIECE_BYTES + HUGE_PAGE))
    for _ in range(2):
        pages.snapshot_read(*read)
    pages.move_when_due()
    assert len(kernel.asked) == 1
    # The time of the call, divided by the share.
    assert pages.due_s() > 0.01
    pages.move_when_due()
    assert len(kernel.asked) == 1
    first = kernel.asked[0]
    assert sorted([first, *moved(pages, kernel)]) == [
        (BASE, PIECE_BYTES),
        (BASE + PIECE_BYTES, PIECE_BYTES),
        (BASE + 2 * PIECE_BYTES, HUGE_PAGE),
    ]


def test_what_fails_is_tried_again_sooner_but_not_for_ever(pages, kernel, monkeypatch):
    monkeypatch.setattr(huge_pages, "_RETRY_S", 0.0)
    kernel.pinned = {BASE}
    failing, moving = (BASE, HUGE_PAGE), (BASE + PIECE_BYTES, HUGE_PAGE)
    read = regions(failing, moving)
    pages.snapshot_read(*read)
    tries = []
    for _ in range(6):
        pages.snapshot_read(*read)
        tries.append(moved(pages, kernel).count(failing))
    assert tries == [1, 1, 1, 1, 0, 0]


def test_one_success_in_between_begins_the_count_anew(pages, kernel, monkeypatch):
    monkeypatch.setattr(huge_pages, "_RETRY_S", 0.0)
    monkeypatch.setattr(huge_pages, "_AGAIN_S", 0.0)
    read = regions((BASE, HUGE_PAGE))
    pages.snapshot_read(*read)
    tries = []
    for pinned in [{BASE}] * 3 + [set()] + [{BASE}] * 5:
        kernel.pinned = pinned
        pages.snapshot_read(*read)
        tries.append(len(moved(pages, kernel)))
    assert tries == [1] * 8 + [0]


def test_what_was_moved_is_looked_at_again_later(pages, kernel, monkeypatch):
    monkeypatch.setattr(huge_pages, "_AGAIN_S", 0.0)
    read = regions((BASE, HUGE_PAGE))
    pages.snapshot_read(*read)
    for _ in range(5):
        pages.snapshot_read(*read)
        assert len(moved(pages, kernel)) == 1


def test_nothing_is_moved_where_the_host_forbids_huge_pages_or_nothing_is_read(kernel):
    for setting, read in (("never", regions((BASE, PIECE_BYTES))), ("madvise", [np.empty(0, np.uint64)] * 2)):
        pages = HugePages(setting=setting, move=kernel.move)
        for _ in range(3):
            pages.snapshot_read(*read)
        assert pages.due_s() == math.inf
        pages.move_when_due()
    assert kernel.asked == []


@needs_movable_memory
@pytest.mark.skipif(huge_page_setting() == "always", reason="all memory is in huge pages here")
@pytest.mark.slow
def test_a_session_moves_the_state_that_it_captures(tmp_path):
    model, optimizer = make(2048)
    one_step(model, optimizer)
    state = [*model.parameters(), *(v for kept in optimizer.state.values() for v in kept.values())]
    large = [tensor for tensor in state if tensor.nbytes >= 4 * HUGE_PAGE]
    assert len(large) == 6
    addresses = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in large]
    # Of each tensor the first and the last huge page may belong to something else.
    whole = sum(tensor.nbytes - 2 * HUGE_PAGE for tensor in large)
    before = huge_bytes(*addresses)
    expected = {}
    with capture.enable(model, optimizer=optimizer, history=tmp_path, every=1) as session:
        deadline = time.monotonic() + 60
        while huge_bytes(*addresses) - before < whole and time.monotonic() < deadline:
            one_step(model, optimizer)
            expected = {session.step: reference(model, optimizer)}
            session.wait()
        one_step(model, optimizer)
        expected[session.step] = reference(model, optimizer)
    assert huge_bytes(*addresses) - before >= whole
    assert len(expected) == 2
    for step, state in expected.items():
        other, its_optimizer = make(2048, seed=6)
        capture.restore(step, history=tmp_path, model=other, optimizer=its_optimizer)
        assert_same(reference(other, its_optimizer), state)
