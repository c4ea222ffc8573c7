"""What is written from memory moves into huge pages: only what stays, at a small share of the time, without a trace."""

import errno
import math
import os
import time

import numpy as np
import pytest
from capture_helpers import assert_same, make, one_step, reference
from huge_pages import huge_bytes, needs_movable_memory

import capture
from capture.publishing.huge_pages import HugePages
from native import HUGE_PAGE_BYTES as PAGE

PIECE = 8 * PAGE
BASE = 64 * PIECE


class Host:
    """A host with a clock of its own. A call takes 4 ms and fails with the errno in `failing` for its address."""

    def __init__(self):
        self.now = 1000.0
        self.asked = []
        self.failing = {}
        self.foreign = set()

    def move(self, *, address, nbytes):
        self.now += 0.004
        self.asked.append((address, nbytes))
        if address in self.failing:
            raise OSError(self.failing[address], os.strerror(self.failing[address]))

    def among(self, pages):
        return pages[~np.isin(pages * PAGE, list(self.foreign))]

    def pages(self, *, is_possible=True):
        return HugePages(move=self.move, is_possible=lambda: is_possible, among=self.among, clock=lambda: self.now)

    def moved(self, pages):
        """Return what is moved until nothing is to be moved any more, in order."""
        self.asked.clear()
        while pages.due_s() < math.inf:
            self.now += max(0.0, pages.due_s())
            pages.move_when_due()
        return self.asked.copy()


def regions(*pairs):
    """Return addresses and lengths as a plan has them."""
    return list(np.array(pairs, np.uint64).reshape(-1, 2).T)


def twice(pages, *pairs):
    for _ in range(2):
        pages.written_from(*regions(*pairs))


@pytest.fixture
def host():
    return Host()


def test_whole_huge_pages_are_moved_of_memory_that_two_snapshots_were_written_from(host):
    pages = host.pages()
    # In any order, with malloc's own words between two, one within another; the last is alone and too small.
    written = regions(
        (BASE + PAGE + 64, 3 * PAGE), (BASE + 16, PAGE), (BASE + 2 * PAGE, 4096), (BASE + 9 * PAGE, PAGE - 1)
    )
    pages.written_from(*written)
    assert host.moved(pages) == []
    pages.written_from(*written)
    assert host.moved(pages) == [(BASE + PAGE, 3 * PAGE)]
    pages.written_from(*written)
    assert host.moved(pages) == []


def test_a_tensor_that_moves_keeps_none_beside_it_from_being_moved(host):
    pages = host.pages()
    for step in range(4):
        pages.written_from(*regions((BASE, 4 * PAGE), (BASE + 4 * PAGE, (1 + step % 2) * PAGE)))
        assert host.moved(pages) == {1: [(BASE, 5 * PAGE)]}.get(step, [])
    twice(pages, (BASE, 6 * PAGE))
    assert host.moved(pages) == [(BASE + 5 * PAGE, PAGE)]


def test_memory_that_is_let_go_before_its_turn_is_left_alone(host):
    pages = host.pages()
    twice(pages, (BASE, PAGE), (BASE + PIECE, PAGE))
    pages.written_from(*regions((BASE + PIECE, PAGE)))
    assert host.moved(pages) == [(BASE + PIECE, PAGE)]
    twice(pages, (BASE, PAGE))
    pages.written_from(*regions())
    assert host.moved(pages) == []


def test_what_is_not_of_this_process_alone_is_left_alone(host):
    pages = host.pages()
    host.foreign = {BASE + PAGE}
    twice(pages, (BASE, 3 * PAGE))
    assert host.moved(pages) == [(BASE, PAGE), (BASE + 2 * PAGE, PAGE)]


def test_much_memory_is_moved_in_pieces_that_take_a_small_share_of_the_time(host):
    pages = host.pages()
    twice(pages, (BASE, 100 * PIECE + PAGE))
    began = host.now
    pages.move_when_due()
    # What was saved up in a second.
    assert 1 < len(host.asked) < 20
    at_once = host.asked.copy()
    pages.move_when_due()
    assert host.asked == at_once
    assert at_once + host.moved(pages) == [*((BASE + i * PIECE, PIECE) for i in range(100)), (BASE + 100 * PIECE, PAGE)]
    assert 101 * 0.004 / 0.05 - 1.1 < host.now - began < 101 * 0.004 / 0.05


def test_what_is_pinned_is_tried_again_after_growing_pauses(host):
    pages = host.pages()
    host.failing = {BASE: errno.EAGAIN}
    written = (BASE, PAGE), (BASE + PIECE, PAGE)
    twice(pages, *written)
    assert host.moved(pages) == [(BASE, PAGE), (BASE + PIECE, PAGE)]
    tried = []
    for _ in range(1000):
        pages.written_from(*regions(*written))
        if host.moved(pages):
            assert host.asked == [(BASE, PAGE)]
            tried.append(host.now)
        host.now += 1
    pauses = np.diff(tried)
    assert pauses[0] == pytest.approx(2, abs=1.5)
    assert (pauses[1:5] > 1.5 * pauses[:4]).all()
    assert pauses[-1] == pytest.approx(300, abs=1.5)
    host.failing = {}
    host.now += 300
    pages.written_from(*regions(*written))
    assert host.moved(pages) == [(BASE, PAGE)]
    host.now += 1000
    pages.written_from(*regions(*written))
    assert host.moved(pages) == []


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EBUSY])
def test_a_host_that_is_short_of_huge_pages_is_left_in_peace_for_minutes(host, code):
    pages = host.pages()
    written = (BASE, 3 * PIECE)
    host.failing = {BASE: code}
    twice(pages, written)
    assert host.moved(pages) == [(BASE, PIECE)]
    host.failing = {}
    host.now += 290
    pages.written_from(*regions(written))
    assert host.moved(pages) == []
    host.now += 10
    pages.written_from(*regions(written))
    assert host.moved(pages) == [(BASE + i * PIECE, PIECE) for i in range(3)]


def test_memory_that_can_t_be_moved_is_not_tried_again(host):
    pages = host.pages()
    host.failing = {BASE: errno.EINVAL}
    for step in range(4):
        pages.written_from(*regions((BASE, PAGE)))
        assert len(host.moved(pages)) == (step == 1)
        host.now += 1000


def test_after_a_fork_all_is_looked_at_again(host):
    pages = host.pages()
    twice(pages, (BASE, PAGE))
    assert host.moved(pages) == [(BASE, PAGE)]
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    pages.written_from(*regions((BASE, PAGE)))
    assert host.moved(pages) == [(BASE, PAGE)]
    pages.written_from(*regions((BASE, PAGE)))
    assert host.moved(pages) == []


def test_nothing_is_moved_where_it_is_not_possible(host):
    pages = host.pages(is_possible=False)
    twice(pages, (BASE, PIECE))
    assert pages.due_s() == math.inf
    pages.move_when_due()
    assert host.asked == []


@needs_movable_memory
@pytest.mark.slow
def test_a_session_moves_the_state_that_it_captures(tmp_path):
    model, optimizer = make(2048)
    one_step(model, optimizer)
    state = [*model.parameters(), *(v for kept in optimizer.state.values() for v in kept.values())]
    large = [tensor for tensor in state if tensor.nbytes >= 4 * PAGE]
    assert len(large) == 6
    addresses = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in large]
    # Of each tensor the first and the last huge page may belong to something else.
    whole = sum(tensor.nbytes - 2 * PAGE for tensor in large)
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
