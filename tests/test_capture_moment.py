"""A step keeps its own generators, loader position, buffers and schedule, whenever it is captured and whatever runs in
between.
"""

import warnings

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference
from torchdata.stateful_dataloader import StatefulDataLoader

import capture
from catalog.history import History


class Counter:
    """State of the user's that the loop moves after the optimizer, as an average of weights would."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]


def test_a_step_captured_late_is_as_it_was(history):
    """The last step is not due; then comes another forward, the loader moves on, and numbers are drawn."""
    model, optimizer = make()
    loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    batches = iter(loader)
    session = capture.enable(model, optimizer=optimizer, every=5, history=history, dataloader=loader)
    for _ in range(7):
        next(batches)
        one_step(model, optimizer)
    expected, rng = reference(model, optimizer), torch.get_rng_state()
    following = [batch.tolist() for batch in batches]
    model(torch.randn(8, 64))
    session.close()
    assert_same(capture.restore(7, history=history), expected)

    again, optimizer = make(seed=9)
    loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
    capture.restore(7, history=history, model=again, optimizer=optimizer, dataloader=loader)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [batch.tolist() for batch in loader] == following


def test_a_large_buffer_that_changes_late_for_the_first_time_is_said(history):
    model, optimizer = make()
    model.register_buffer("table", torch.zeros(100_000))
    session = capture.enable(model, optimizer=optimizer, every=5, history=history)
    one_step(model, optimizer)
    model.table.add_(1)
    with pytest.warns(UserWarning, match="step 1 .* captured late: buffers table"):
        session.close()


def test_a_large_buffer_that_is_known_to_change_is_kept(history):
    model, optimizer = make()
    model.register_buffer("table", torch.zeros(100_000))
    session = capture.enable(model, optimizer=optimizer, every=5, history=history)
    for _ in range(3):
        model.table.add_(1)
        one_step(model, optimizer)
    expected = reference(model, optimizer)
    model.table.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
    assert_same(capture.restore(3, history=history), expected)


@pytest.mark.parametrize("evaluate", ["no_grad", "eval"])
def test_an_evaluation_before_the_schedulers_move_does_not_end_the_step(history, evaluate):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = {}
    with capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=1, history=history) as session:
        for step in range(1, 5):
            one_step(model, optimizer)
            if evaluate == "eval":
                model.eval()(torch.randn(8, 64))
                model.train()
            else:
                with torch.no_grad():
                    model(torch.randn(8, 64))
            scheduler.step()
            rates[step] = (optimizer.param_groups[0]["lr"], scheduler.last_epoch)
    for step, expected in rates.items():
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, scheduler=scheduler)
        assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == expected


def test_a_scheduler_by_epochs_keeps_the_steps_own_state_also_when_it_is_captured_late(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    session = capture.enable(model, optimizer=optimizer, scheduler=scheduler, every=100, history=history)
    for _ in range(3):
        one_step(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    scheduler.step()
    session.close()
    capture.restore(3, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == rate
    assert scheduler.last_epoch == 0


def test_what_the_loop_updates_after_the_optimizer_belongs_to_the_step(history):
    model, optimizer = make()
    average = Counter()
    providers = [capture.Stateful("average", average)]
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers) as session:
        for _ in range(3):
            one_step(model, optimizer)
            average.updates += 1
    for step in range(1, 4):
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, providers=providers)
        assert average.updates == step


def test_a_prediction_of_one_element_is_no_loss(history):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        model(torch.randn(1, 4)).sub(3).square().sum().backward()
        optimizer.step()
    names = {row["name"] for row in History.open(history).query("SELECT name FROM metrics").to_pylist()}
    assert "step_time_s" in names
    assert "loss" not in names
