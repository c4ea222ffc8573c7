"""Copies of a captured module are modules of their own: they can be made, and nothing that happens to them is captured."""

import copy
import io

import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference

import capture


def test_a_copy_that_is_trained_does_not_settle_the_step(history):
    """As a teacher or an average of weights is: its forward runs between the update and the scheduler's move."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history)
    rates = {}
    for step in (1, 2):
        one_step(model, optimizer)
        copy.deepcopy(model)(torch.randn(8, 64)).sum().backward()
        scheduler.step()
        rates[step] = scheduler.get_last_lr()
    session.close()

    for step in (1, 2):
        again, its_optimizer = make(seed=9)
        its_scheduler = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
        capture.restore(step, history=history, model=again, optimizer=its_optimizer, scheduler=its_scheduler)
        assert its_scheduler.get_last_lr() == rates[step]


def test_a_captured_module_can_be_pickled_whole(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history)
    one_step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    expected = reference(model, optimizer)

    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.load_state_dict(loaded.state_dict())
    one_step(loaded, torch.optim.AdamW(loaded.parameters()))
    session.close()

    assert committed_steps(history, session.run) == [0, 1]
    assert_same(capture.restore(1, history=history), expected)
