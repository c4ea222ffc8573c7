"""A declared edit between two steps belongs to the step before: its checkpoint is what the next step starts from."""

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, faulty_session, make, one_step, reference

import capture
import native
from catalog.errors import SnapshotError
from catalog.history import History

STEPS = 5


class Training:
    """A training whose every step ends with edits that draw numbers, of weights, moments, buffers and the rate, some
    before the scheduler's move and some behind it.
    """

    def __init__(self, *, seed):
        self.model, self.optimizer = make(seed=seed)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.losses = {}

    def steps(self, session, first):
        for step in range(first, STEPS + 1):
            self.losses[step] = one_step(self.model, self.optimizer)
            with session.modify(), torch.no_grad():
                self.model.inner.weight.add_(torch.randn(64, 64), alpha=0.01)
                self.model.norm.running_mean.mul_(0.5)
            self.scheduler.step()
            with session.modify():
                self.optimizer.state[self.model.outer.weight]["exp_avg"].data.mul_(0.5)
                self.optimizer.param_groups[0]["lr"] *= 1.01
        return reference(self.model, self.optimizer), self.scheduler.state_dict(), torch.get_rng_state()


@pytest.mark.guards("Resume is exact")
@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_training_with_edits_after_every_step_goes_on_from_each_with_the_same_bits(history, every):
    training = Training(seed=5)
    with capture.enable(training.model, **training.state, every=every, history=history, stats_every=0) as session:
        state, schedule, rng = training.steps(session, 1)
    assert session.failures == []
    steps = committed_steps(history, session.run)
    assert steps == sorted({*range(0, STEPS, every), STEPS})
    for step in steps:
        again = Training(seed=9)
        capture.restore(f"{session.run}:{step}", history=history, model=again.model, **again.state)
        with capture.enable(again.model, **again.state, every=100, history=history, stats_every=0) as resumed:
            state_again, schedule_again, rng_again = again.steps(resumed, step + 1)
        assert again.losses == {at: loss for at, loss in training.losses.items() if at > step}
        assert_same(state_again, state)
        assert schedule_again == schedule
        assert torch.equal(rng_again, rng)


def test_a_snapshot_that_an_edit_drops_leaves_nothing_behind(history):
    model, optimizer = make(1500)
    faults = native.Faults(delay_us=50_000)
    session = faulty_session(model, optimizer, history, faults=faults, budget_bytes=10 * MIB, stats_every=0)
    one_step(model, optimizer)
    folder = history / "runs" / session.run / "steps" / f"{1:012d}"
    assert list(folder.iterdir()), "the snapshot has not begun: the test shows nothing"
    for value in (1.0, 2.0):
        with session.modify():
            assert list(folder.iterdir()) == []
            model.inner.weight.data.fill_(value)
    expected = reference(model, optimizer)
    one_step(model, optimizer)
    session.close()
    assert session.failures == []
    assert committed_steps(history, session.run) == [0, 1, 2]
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_an_edit_behind_a_committed_step_is_told_and_the_step_stays(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    session.wait()
    said = r"step 1 of run .* stays as it was before this edit.*before session\.wait"
    with pytest.warns(UserWarning, match=said), session.modify():
        model.inner.weight.data.zero_()
    session.close()
    assert committed_steps(history, session.run) == [0, 1]
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)
    events = History.open(history).query("SELECT step, name FROM events").to_pylist()
    assert {"step": 1, "name": "edited_after_commit"} in events


@pytest.mark.filterwarnings("error")
def test_an_edit_between_forward_and_update_is_part_of_the_next_step(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        one_step(model, optimizer)
        expected = reference(model, optimizer)
        loss = model(torch.randn(8, 64)).square().mean()
        with session.modify():
            model.inner.weight.data.mul_(2)
        loss.backward()
        optimizer.step()
    del expected["buffer"]
    restored = capture.restore(f"{session.run}:1", history=history)
    del restored["buffer"]
    assert_same(restored, expected)


def test_a_state_that_is_loaded_within_an_edit_belongs_to_the_step(history):
    model, optimizer = make()
    other, _ = make(seed=8)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        one_step(model, optimizer)
        with session.modify():
            model.load_state_dict(other.state_dict())
            model(torch.randn(8, 64))
            model.outer.weight.data.zero_()
        expected = reference(model, optimizer)
        one_step(model, optimizer)
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_an_exception_within_an_edit_costs_that_step_and_is_told(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0)

    def train():
        with session:
            one_step(model, optimizer)
            one_step(model, optimizer)
            with session.modify():
                model.inner.weight.data.zero_()
                raise ZeroDivisionError

    with pytest.warns(UserWarning, match="half edited"), pytest.raises(ZeroDivisionError):
        train()
    assert committed_steps(history, session.run) == [0, 1]
    assert [type(failure) for failure in session.failures] == [SnapshotError]
