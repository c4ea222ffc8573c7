"""`resume="auto"` verifies in shares: every byte is read by one rank, and damage in any share counts for all."""

import pytest
from capture_helpers import make, one_step

import capture
from capture.collectives import Ranks
from capture.resume import _problem
from catalog.disk.locks import free_lock, try_lock
from catalog.history import History
from catalog.verify import verify


@pytest.fixture
def written(history) -> History:
    model, optimizer = make(256)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        one_step(model, optimizer)
        session.wait()
    return History.open(history)


def bytes_read(history: History, share: tuple[int, int]) -> int:
    read: list[int] = []
    assert verify(history, [history.resolve(1)], progress=read.append, share=share) == []
    return sum(read)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_shares_are_about_equal_and_make_up_the_whole(written, ranks):
    whole = bytes_read(written, (0, 1))
    shares = [bytes_read(written, (rank, ranks)) for rank in range(ranks)]
    assert sum(shares) == whole
    assert max(shares) < 1.3 * whole / ranks


@pytest.mark.parametrize("position", [0.2, 0.5, 0.8])
def test_damage_is_found_by_the_rank_whose_share_it_is(written, position):
    ref = written.resolve(1)
    path = written.paths.data(ref.run, ref.step, 0)
    data = bytearray(path.read_bytes())
    data[int(len(data) * position)] ^= 1
    path.write_bytes(data)
    found = [verify(written, [ref], share=(rank, 3)) for rank in range(3)]
    assert [len(problems) for problems in found if problems] == [1]


def test_each_rank_of_a_resume_verifies_its_own_share(written):
    """Of three ranks one alone finds the damage, so none has read the shares of the others."""
    ref = written.resolve(1)
    path = written.paths.data(ref.run, ref.step, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    found = [_problem(written, ref, Ranks(rank, 3)) for rank in range(3)]
    assert sum(problem is not None for problem in found) == 1


def test_a_damaged_checkpoint_is_passed_over_and_said(written, history):
    ref = written.resolve(1)
    path = written.paths.data(ref.run, ref.step, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    model, optimizer = make(256)
    with (
        pytest.warns(UserWarning, match=rf"checkpoint {ref} is passed over.*checksum of"),
        capture.enable(model, optimizer=optimizer, every=1, history=history, resume="auto") as session,
    ):
        facts = written.run_facts(session.run)
    assert facts.parent_step == 0


def test_a_run_that_somebody_looks_after_for_a_moment_is_gone_on_with(written, history, monkeypatch):
    """A training that begins in the same history holds the locks of a dead run while it removes its leftovers."""
    run = written.current_run()
    held = try_lock(written.paths.lock(run, 0))
    assert held is not None
    asked, looks = History.held, []

    def let_go_after_a_look(self: History, name: str) -> bool:
        looks.append(asked(self, name))
        if len(looks) == 1:
            free_lock(held)
        return looks[-1]

    monkeypatch.setattr(History, "held", let_go_after_a_look)
    model, optimizer = make(256, seed=6)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, resume="auto") as session:
        assert session.resumed_from == written.resolve(f"{run}:1")
    assert looks[:2] == [True, False]
