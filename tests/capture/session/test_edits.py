"""An edit behind the session's back fails that snapshot by name; a declared edit and a late one do not."""

import threading

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, faulty_session, make, one_step, reference

import capture
import native
from capture.changes.change_detector import Comparison
from capture.snapshot.snapshot import Snapshot
from catalog.errors import CorruptError, SetupError, SnapshotError

SLOW = {"delay_us": 100_000}


def clamp(model):
    with torch.no_grad():
        model.inner.weight.clamp_(-0.001, 0.001)


def clamp_data(model):
    model.inner.weight.data.clamp_(-0.001, 0.001)


def slow_session(model, optimizer, history, **options):
    return faulty_session(model, optimizer, history, faults=native.Faults(**SLOW), budget_bytes=10 * MIB, **options)


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("edit", [clamp, lambda model: model.inner.weight.untyped_storage().resize_(0)])
def test_an_edit_while_it_is_read_fails_the_snapshot_by_name(history, edit):
    model, optimizer = make(1500)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    edit(model)
    with pytest.raises(SnapshotError, match=r"step 1.*inner\.weight.*step 1.*session\.modify"):
        session.wait()
    session.close()
    assert committed_steps(history, session.run) == [0]


@pytest.mark.guards("A checkpoint holds one step")
def test_without_the_change_detector_the_same_edit_is_torn(history, monkeypatch):
    """This guards the test above: the refused snapshot really differs from the step."""
    monkeypatch.setattr(Comparison, "changed", lambda self: [])
    model, optimizer = make(1500)
    session = slow_session(model, optimizer, history)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            optimizer.state[parameter]["exp_avg"].zero_()
            optimizer.state[parameter]["exp_avg_sq"].zero_()
    session.close()
    with pytest.raises((AssertionError, CorruptError), match=r"torn|checksum"):
        assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_an_edit_after_everything_has_been_read_is_accepted(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        expected = reference(model, optimizer)
        session.wait()
        clamp(model)
        one_step(model, optimizer)
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)
    assert committed_steps(history, session.run) == [0, 1, 2]


@pytest.mark.parametrize("check", ["sampled", "hash"])
def test_writes_that_version_counters_do_not_see(history, check):
    model, optimizer = make(1500)
    session = slow_session(model, optimizer, history, check=check)
    one_step(model, optimizer)
    clamp_data(model)
    with pytest.raises(SnapshotError, match=r"model 'inner\.weight': written to"):
        session.wait()
    one_step(model, optimizer)
    with session.modify():
        clamp_data(model)
    expected = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 2]
    assert_same(capture.restore(f"{session.run}:2", history=history), expected)


@pytest.mark.parametrize("check", ["sampled", "versions", "hash"])
def test_a_training_that_edits_nothing_passes(history, check):
    model, optimizer = make(300)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, check=check) as session:
        for _ in range(4):
            one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 2, 3, 4]


def test_an_unknown_check_is_refused(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match="check='sometimes'"):
        capture.enable(model, optimizer=optimizer, history=history, check="sometimes")


def test_a_declared_edit_on_another_thread_waits_for_a_snapshot_that_is_just_beginning(history, monkeypatch):
    model, optimizer = make(1500)
    session = slow_session(model, optimizer, history, stats_every=0)
    began, edited = threading.Event(), threading.Event()

    def edit():
        began.wait()
        with session.modify():
            model.inner.weight.data.zero_()
        edited.set()

    def start(*args, real=Snapshot.start, **options):
        snapshot = real(*args, **options)
        began.set()
        # The other thread gets the time to edit before the training goes on, unless it waits as it should.
        edited.wait(0.3)
        return snapshot

    monkeypatch.setattr(Snapshot, "start", start)
    editor = threading.Thread(target=edit)
    editor.start()
    loss = model(torch.randn(8, 1500)).square().mean()
    loss.backward()
    expected = {}
    hook = optimizer.register_step_post_hook(lambda *_: expected.update(reference(model, optimizer)))
    optimizer.step()
    hook.remove()
    editor.join()
    session.wait()
    session.close()
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)
