"""No checkpoint is torn, however slow the writer and early the updates: every bit equals an eager copy."""

from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, faulty_session, make, one_step, reference

import capture
import native
from capture.changes.change_detector import Comparison
from capture.session.step_events import StepEvents
from catalog.errors import CorruptError

pytestmark = pytest.mark.slow

BACKENDS = ["posix", *(["io_uring"] if not native.probe_io_uring() else [])]
SLOW = {"delay_us": 40_000, "reorder": True, "short_write_every": 3}


def train_and_compare(root: Path, *, width: int, steps: int, budget_bytes: int, backend: str) -> None:
    model, optimizer = make(width)
    session = faulty_session(
        model, optimizer, root, faults=native.Faults(**SLOW), budget_bytes=budget_bytes, backend=backend
    )
    expected = {0: reference(model, optimizer)}
    for step in range(1, steps + 1):
        one_step(model, optimizer)
        expected[step] = reference(model, optimizer)
    session.close()
    assert committed_steps(root, session.run) == sorted(expected)
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=root), state)


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step_of_a_state_larger_than_the_budget(history, backend):
    """State of 52 MB, whose largest tensor has 16 MB, goes through a budget of 10 MB."""
    train_and_compare(history, width=1500, steps=4, budget_bytes=10 * MIB, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_small_tensors(history, backend):
    train_and_compare(history, width=64, steps=12, budget_bytes=16 * MIB, backend=backend)


@pytest.mark.guards("A checkpoint holds one step")
def test_without_the_barrier_the_same_training_is_torn(history, monkeypatch):
    """This guards the tests above: they would detect a torn checkpoint."""
    monkeypatch.setattr(StepEvents, "before_update", lambda self: None)
    monkeypatch.setattr(Comparison, "changed", lambda self: [])
    with pytest.raises((AssertionError, CorruptError), match=r"torn|checksum"):
        train_and_compare(history, width=1500, steps=4, budget_bytes=10 * MIB, backend="posix")


@pytest.mark.guards("A checkpoint holds one step")
def test_buffers_have_the_values_of_the_step_and_not_of_the_next_forward(history):
    model, optimizer = make()
    session = faulty_session(model, optimizer, history, faults=native.Faults(delay_us=20_000), every=1)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    model(torch.randn(8, 64))
    assert not torch.equal(expected["buffer"]["norm.running_mean"], model.norm.running_mean)
    session.close()
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_edits_between_steps_inside_modify(history):
    model, optimizer = make(1500)
    session = faulty_session(model, optimizer, history, faults=native.Faults(**SLOW), every=1)
    one_step(model, optimizer)
    with session.modify(), torch.no_grad():
        model.inner.weight.clamp_(-0.001, 0.001)
    expected = reference(model, optimizer)
    session.close()
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


@pytest.mark.parametrize("what", ["module", "optimizer"])
def test_loading_a_state_dict_waits_for_the_snapshot(history, what):
    model, optimizer = make(1500)
    session = faulty_session(model, optimizer, history, faults=native.Faults(**SLOW), every=1)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    other, other_optimizer = make(1500, seed=6)
    one_step(other, other_optimizer)
    if what == "module":
        model.load_state_dict(other.state_dict())
    else:
        optimizer.load_state_dict(other_optimizer.state_dict())
    session.close()
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


def test_a_parameter_at_a_new_address_gets_a_new_plan(history):
    """Memory that the training frees during its write stays alive, and the next snapshot reads the new memory."""
    model, optimizer = make(1500)
    session = faulty_session(model, optimizer, history, faults=native.Faults(**SLOW), every=1)
    one_step(model, optimizer)
    expected = {1: reference(model, optimizer)}
    model.inner.weight.data = torch.full_like(model.inner.weight, 0.5)
    one_step(model, optimizer)
    expected[2] = reference(model, optimizer)
    model.outer.weight.data = model.outer.weight.data.t()
    one_step(model, optimizer)
    expected[3] = reference(model, optimizer)
    session.close()
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_gradient_scaler_and_parameters_added_later(history):
    """With a GradScaler the update still waits for the barrier, and a step that it skips is not captured."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session = faulty_session(model, optimizer, history, faults=native.Faults(delay_us=1_000), every=1)
    expected = {}
    extra = torch.nn.Parameter(torch.ones(3))
    for turn in range(4):
        loss = model(torch.randn(8, 64)).square().mean() + (extra.sum() if turn > 1 else 0)
        scaler.scale(loss * (float("inf") if turn == 1 else 1.0)).backward()
        if turn == 2:
            model.extra = extra
            optimizer.add_param_group({"params": [extra]})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if turn != 1:
            expected[len(expected) + 1] = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 1, 2, 3]
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)
