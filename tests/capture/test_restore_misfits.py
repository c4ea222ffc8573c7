"""Mismatches are refused by name: another model, another dtype, a missing step; two trainings get separate runs."""

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference

import capture
from catalog.errors import MismatchError, NotFoundError


def test_a_restore_into_another_model_is_refused_with_both_sides_and_changes_nothing(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
    wider, its_optimizer = make(96)
    before = reference(wider, its_optimizer)
    with pytest.raises(MismatchError, match=r"\(64, 64\).*\(96, 96\)"):
        capture.restore(f"{session.run}:1", history=history, model=wider, optimizer=its_optimizer)
    assert_same(reference(wider, its_optimizer), before)
    one_step(wider, its_optimizer)


def test_a_step_that_was_not_captured_names_the_nearest(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=2, history=history):
        for _ in range(4):
            one_step(model, optimizer)
    with pytest.raises(NotFoundError, match="2 and 4"):
        capture.restore(3, history=history)
    with pytest.raises(NotFoundError, match="no history"):
        capture.restore(3, history=history / "elsewhere")


def test_a_restore_into_another_dtype_is_refused_with_both_and_changes_nothing(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
    low, _ = make(seed=6)
    low = low.to(torch.bfloat16)
    its_optimizer = torch.optim.AdamW(low.parameters())
    before = reference(low, its_optimizer)
    with pytest.raises(MismatchError, match=r"dtype F32 in the checkpoint, BF16 here.*nothing was changed"):
        capture.restore(f"{session.run}:1", history=history, model=low, optimizer=its_optimizer)
    assert_same(reference(low, its_optimizer), before)


def test_two_trainings_at_once_in_one_history_have_a_run_each(history):
    trainings = [make(width, seed=width) for width in (64, 96)]
    sessions = [capture.enable(model, optimizer=own, every=1, history=history) for model, own in trainings]
    expected = {}
    for _ in range(3):
        for (model, optimizer), session in zip(trainings, sessions, strict=True):
            one_step(model, optimizer)
            expected[f"{session.run}:{session.snapshot()}"] = reference(model, optimizer)
    for session in sessions:
        session.close()
        assert committed_steps(history, session.run) == [0, 1, 2, 3]
    assert len({session.run for session in sessions}) == 2
    for ref, state in expected.items():
        assert_same(capture.restore(ref, history=history), state)


def test_a_provider_that_is_new_starts_fresh_with_a_warning(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history, every=1):
        one_step(model, optimizer)
    weights = reference(model, optimizer)
    torch.nn.init.zeros_(model.outer.weight)
    average = {"decay": 0.5}
    ema = [capture.Stateful("ema", average)]
    with pytest.warns(UserWarning, match="has no 'ema', it has counters, .*: 'ema' stays as it is and starts fresh"):
        capture.restore(1, model=model, optimizer=optimizer, history=history, providers=ema)
    assert_same(reference(model, optimizer), weights)
    assert average == {"decay": 0.5}
    with (
        pytest.warns(UserWarning, match="'ema' stays as it is"),
        capture.enable(model, optimizer=optimizer, history=history, every=1, providers=ema, resume="auto"),
    ):
        one_step(model, optimizer)
    average["decay"] = 0.0
    capture.restore(2, model=model, optimizer=optimizer, history=history, providers=ema)
    assert average == {"decay": 0.5}
