"""Copies of a captured module are independent of the session: they can be made, and nothing in them is captured."""

import copy
import gc
import io
import weakref

import pytest
import torch
from capture_helpers import Net, assert_same, committed_steps, make, one_step, reference

import capture
from catalog.history import History


class Losing(Net):
    """The forward pass of this model returns the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_copy_is_not_mistaken_for_the_training(history, copied):
    """A teacher or weight average is loaded and trained between the update and the scheduler's step."""
    torch.manual_seed(5)
    model = Losing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history)
    rates, losses = {}, {}
    for step in (1, 2):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64))
        loss.backward()
        optimizer.step()
        twin = copied(model)
        if copied is copy.deepcopy:
            twin.load_state_dict(model.state_dict())
        twin(100 * torch.randn(8, 64)).backward()
        scheduler.step()
        rates[step], losses[step] = scheduler.get_last_lr(), float(loss.detach())
    session.close()

    logged = History.open(history).query("SELECT step, value FROM metrics WHERE name = 'loss'").to_pylist()
    assert {row["step"]: row["value"] for row in logged} == pytest.approx(losses)
    for step in (1, 2):
        again, its_optimizer = make(seed=9)
        its_scheduler = torch.optim.lr_scheduler.ExponentialLR(its_optimizer, 0.5)
        capture.restore(step, history=history, model=again, optimizer=its_optimizer, scheduler=its_scheduler)
        assert its_scheduler.get_last_lr() == rates[step]


def test_a_copy_keeps_no_session_alive(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        twin = copy.deepcopy(model)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert twin(torch.randn(8, 64)).isfinite().all()


def test_a_whole_captured_module_can_be_pickled(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history)
    one_step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"capture.loops.module_hooks" not in file.getvalue(), "it would not load where DSHistory is not installed"
    expected = reference(model, optimizer)

    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.load_state_dict(loaded.state_dict())
    one_step(loaded, torch.optim.AdamW(loaded.parameters()))
    session.close()

    assert committed_steps(history, session.run) == [0, 1]
    assert_same(capture.restore(1, history=history), expected)
