"""What is written from memory moves into huge pages: only what stays, at a small share of the time, without a trace."""

import errno
import math
import os
import time

import numpy as np
import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference
from huge_pages import huge_bytes, in_small_pages, needs_movable_memory, whole_pages

import capture
from capture.data_file.in_place import InPlace
from capture.publishing.huge_pages import PAGES_OF_A_PIECE, HugePages
from capture.snapshot.forks import fork_count
from catalog.history import History
from native import HUGE_PAGE_BYTES as PAGE

PIECE = PAGES_OF_A_PIECE * PAGE
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

    def moved(self, training):
        """Return what is moved until nothing is to be moved any more, in order."""
        self.asked.clear()
        while training.pages.due_s() < math.inf:
            self.now += max(0.0, training.pages.due_s())
            training.pages.move_when_due()
        return self.asked.copy()


class Training:
    """A training that is captured again and again; each time the memory that it has is another one, and changes."""

    def __init__(self, host, **options):
        self.pages = host.pages(**options)
        self.step = 0
        self.forks = 0

    def captured(self, *places, unchanged=()):
        """Capture once: `places` are (address, nbytes), of which those in `unchanged` have the content they had."""
        self.step += 1
        addresses, nbytes = np.array(places, np.uint64).reshape(-1, 2).T
        contents = [0 if place in unchanged else self.step for place in places]
        checksums = np.array([content.to_bytes(16, "big") for content in contents], "V16")
        self.pages.written_from(InPlace(addresses, nbytes, checksums), forks=self.forks)

    def captured_twice(self, *places):
        for _ in range(2):
            self.captured(*places)


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def training(host):
    return Training(host)


def test_whole_huge_pages_are_moved_of_memory_that_two_snapshots_were_written_from(host, training):
    # In any order, with malloc's own words between two, one within another; the last is alone and too small.
    places = (BASE + PAGE + 64, 3 * PAGE), (BASE + 16, PAGE), (BASE + 2 * PAGE, 4096), (BASE + 9 * PAGE, PAGE - 1)
    training.captured(*places)
    assert host.moved(training) == []
    training.captured(*places)
    assert host.moved(training) == [(BASE + PAGE, 3 * PAGE)]
    training.captured(*places)
    assert host.moved(training) == []


def test_what_the_training_does_not_change_is_left_alone(host, training):
    trained, frozen = (BASE, 4 * PAGE), (BASE + 4 * PAGE, 4 * PAGE)
    for step in range(3):
        training.captured(trained, frozen, unchanged=[frozen])
        assert host.moved(training) == ([trained] if step == 1 else [])
    training.captured(trained, frozen)
    assert host.moved(training) == [frozen]


def test_a_tensor_that_moves_keeps_none_beside_it_from_being_moved(host, training):
    for step in range(4):
        training.captured((BASE, 4 * PAGE), (BASE + 4 * PAGE, (1 + step % 2) * PAGE))
        assert host.moved(training) == ([(BASE, 4 * PAGE)] if step == 1 else [])
    training.captured_twice((BASE, 6 * PAGE))
    assert host.moved(training) == [(BASE + 4 * PAGE, 2 * PAGE)]


def test_memory_that_is_let_go_before_its_turn_is_left_alone(host, training):
    training.captured_twice((BASE, 3 * PAGE), (BASE + PIECE, PAGE))
    training.captured((BASE, PAGE), (BASE + 2 * PAGE, PAGE))
    assert host.moved(training) == [(BASE, PAGE), (BASE + 2 * PAGE, PAGE)]
    training.captured_twice((BASE + PIECE, PAGE))
    training.captured()
    assert host.moved(training) == []


def test_what_is_not_private_memory_is_left_alone(host, training):
    host.foreign = {BASE + PAGE}
    training.captured_twice((BASE, 3 * PAGE))
    assert host.moved(training) == [(BASE, PAGE), (BASE + 2 * PAGE, PAGE)]


def test_much_memory_is_moved_in_pieces_that_take_a_small_share_of_the_time(host, training):
    training.captured_twice((BASE, 100 * PIECE + PAGE))
    began = host.now
    training.pages.move_when_due()
    # What was saved up in a second.
    assert 1 < len(host.asked) < 20
    at_once = host.asked.copy()
    training.pages.move_when_due()
    assert host.asked == at_once
    pieces = [*((BASE + i * PIECE, PIECE) for i in range(100)), (BASE + 100 * PIECE, PAGE)]
    assert at_once + host.moved(training) == pieces
    assert 101 * 0.004 / 0.05 - 1.1 < host.now - began < 101 * 0.004 / 0.05


def test_what_is_pinned_is_tried_again_after_growing_pauses(host, training):
    host.failing = {BASE: errno.EAGAIN}
    places = (BASE, PAGE), (BASE + PIECE, PAGE)
    training.captured_twice(*places)
    assert host.moved(training) == [*places]
    tried = [host.now]
    for _ in range(2000):
        training.captured(*places)
        if host.moved(training):
            assert host.asked == [(BASE, PAGE)]
            tried.append(host.now)
        host.now += 1
    pauses = np.diff(tried)
    assert pauses[0] == pytest.approx(2, abs=1.5)
    assert (pauses[1:6] > 1.5 * pauses[:5]).all()
    assert pauses[-2:] == pytest.approx(300, abs=1.5)
    host.failing = {}
    host.now += 300
    training.captured(*places)
    assert host.moved(training) == [(BASE, PAGE)]
    host.now += 1000
    training.captured(*places)
    assert host.moved(training) == []


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EBUSY])
def test_a_host_that_is_short_of_huge_pages_is_left_in_peace_for_minutes(host, training, code):
    places = (BASE, 3 * PIECE)
    host.failing = {BASE: code}
    training.captured_twice(places)
    training.pages.move_when_due()
    assert host.asked == [(BASE, PIECE)]
    host.failing = {}
    more = (BASE + 10 * PIECE, PIECE)
    for step in range(29):
        host.now += 10
        training.forks = step // 10
        training.captured(places, more)
        training.pages.move_when_due()
    assert host.asked == [(BASE, PIECE)]
    assert host.moved(training) == [*((BASE + i * PIECE, PIECE) for i in range(3)), more]


def test_memory_that_is_gone_is_no_shortage_of_huge_pages(host, training):
    training.captured_twice((BASE, 3 * PAGE), (BASE + PIECE, PAGE))
    host.failing = {BASE: errno.ENOMEM}
    host.foreign = {BASE}
    began = host.now
    assert host.moved(training) == [(BASE, 3 * PAGE), (BASE + PAGE, 2 * PAGE), (BASE + PIECE, PAGE)]
    assert host.now - began < 1


def test_of_what_can_t_be_moved_each_page_is_tried_once(host, training):
    host.failing = {BASE: errno.EINVAL}
    for step in range(4):
        training.captured((BASE, 2 * PAGE))
        assert host.moved(training) == [[], [(BASE, 2 * PAGE), (BASE, PAGE), (BASE + PAGE, PAGE)], [], []][step]
        host.now += 1000


def test_what_was_changed_since_a_fork_is_moved_again(host, training):
    frozen, places = (BASE + PIECE, PAGE), ((BASE, PAGE), (BASE + PIECE, PAGE))
    training.captured_twice(*places)
    assert host.moved(training) == [*places]
    # Begun before the fork, and written after it.
    training.captured(*places, unchanged=[frozen])
    assert host.moved(training) == []
    training.forks = 1
    training.captured(*places, unchanged=[frozen])
    assert host.moved(training) == [(BASE, PAGE)]
    training.captured(*places, unchanged=[frozen])
    assert host.moved(training) == []


def test_forks_are_counted():
    before = fork_count()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert fork_count() == before + 1


@pytest.mark.parametrize("ended", ["impossible", "stopped"])
def test_nothing_is_moved_where_it_is_not_possible(host, ended):
    training = Training(host, is_possible=ended != "impossible")
    training.captured_twice((BASE, PIECE))
    training.pages.stop()
    training.captured_twice((BASE + PIECE, PIECE))
    assert training.pages.due_s() == math.inf
    training.pages.move_when_due()
    assert host.asked == []


@pytest.mark.slow
def test_a_failure_to_move_fails_no_snapshot(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no memory for the list of mappings")

    monkeypatch.setattr(HugePages, "written_from", fail)
    model, optimizer = make(64)
    with capture.enable(model, optimizer=optimizer, history=tmp_path, every=1) as session:
        for _ in range(6):
            one_step(model, optimizer)
        session.wait()
        assert not session.failures
        run = session.run
    assert committed_steps(tmp_path, run) == [0, 1, 2, 3, 4, 5, 6]
    events = History.open(tmp_path).query("SELECT name, detail->>'reason' AS reason FROM events").to_pylist()
    assert {"name": "huge_pages_failed", "reason": "no memory for the list of mappings"} in events


@needs_movable_memory
@pytest.mark.slow
def test_a_session_moves_the_state_that_it_captures(tmp_path):
    model, optimizer = make(2048)
    memory = [in_small_pages(16 << 20) for _ in range(2)]
    for layer, bytes_ in zip((model.inner, model.outer), memory, strict=True):
        weights = torch.from_numpy(bytes_.view(np.float32)).view(2048, 2048)
        layer.weight.data = weights.copy_(layer.weight.data)
    places = [whole_pages(each.ctypes.data, each.nbytes) for each in memory]
    expected = {}
    with capture.enable(model, optimizer=optimizer, history=tmp_path, every=1) as session:
        deadline = time.monotonic() + 60
        while any(huge_bytes(address) < nbytes for address, nbytes in places) and time.monotonic() < deadline:
            one_step(model, optimizer)
            expected = {session.step: reference(model, optimizer)}
            session.wait()
            if 60 < session._committer._huge_pages.due_s() < math.inf:
                pytest.skip("the host is short of huge pages now")
        one_step(model, optimizer)
        expected[session.step] = reference(model, optimizer)
    assert [huge_bytes(address) for address, _ in places] == [nbytes for _, nbytes in places]
    assert len(expected) == 2
    for step, state in expected.items():
        other, its_optimizer = make(2048, seed=6)
        capture.restore(step, history=tmp_path, model=other, optimizer=its_optimizer)
        assert_same(reference(other, its_optimizer), state)
