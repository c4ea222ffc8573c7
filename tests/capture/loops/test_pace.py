"""A checkpoint has the scheduler as the loop leaves it after the step, also where the loop leaves a move out now and
then; and as it was before an epoch's move, which the resumed loop makes itself.
"""

import pytest
import torch

import capture

LENGTH = 24
LEFT_OUT = {
    "never": (),
    "once": (7,),
    "three times": (7, 8, 12),
    "at first": (1, 2, 3, 4),
    "ten in a row": tuple(range(8, 18)),
}


def train(history, moves, *, last=LENGTH, **options):
    """Train to a step; return where the scheduler is behind each, the losses, and the session."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)
    session = capture.enable(
        model, optimizer=optimizer, scheduler=scheduler, every=1, history=history, stats_every=0, **options
    )
    places, losses = {}, {}
    with session:
        for step in range(session.step + 1, last + 1):
            loss = model(torch.randn(8, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if moves(step):
                scheduler.step()
            places[step] = scheduler.last_epoch, optimizer.param_groups[0]["lr"]
    return places, losses, session


def stored_place(history, step):
    """Return where a training that is restored finds its scheduler."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)
    capture.restore(step, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    return scheduler.last_epoch, optimizer.param_groups[0]["lr"]


@pytest.mark.guards("Resume is exact")
@pytest.mark.parametrize("case", LEFT_OUT)
def test_moves_that_are_left_out_make_no_epochs(history, case):
    left_out = LEFT_OUT[case]
    places, _, _ = train(history, lambda step: step not in left_out)
    # Nothing tells the first move behind others that were left out at first from the end of an epoch.
    known = [step for step in places if not (case == "at first" and step == 5)]
    assert {step: stored_place(history, step) for step in known} == {step: places[step] for step in known}


@pytest.mark.parametrize("stop", [7, 9, 20])
def test_a_resumed_training_goes_on_with_the_same_losses(tmp_path, stop):
    def moves(step):
        return step != 7

    _, losses, _ = train(tmp_path / "whole", moves)
    train(tmp_path / "stopped", moves, last=stop)
    _, resumed, session = train(tmp_path / "stopped", moves, resume="auto")
    assert session.resumed_from is not None
    assert resumed == {step: loss for step, loss in losses.items() if step > stop}


def test_what_was_learned_outlives_the_session(tmp_path):
    """Right after a resume a move is left out, and the step behind it is no end of an epoch."""
    train(tmp_path, lambda step: True, last=10)
    places, _, _ = train(tmp_path, lambda step: step != 11, resume="auto")
    assert {step: stored_place(tmp_path, step) for step in places} == places


@pytest.mark.parametrize("warm_up", [0, 6])
def test_an_epoch_ends_with_the_state_before_its_move(history, warm_up):
    """With a warm-up by updates, once the scheduler has stood still for longer than a loop leaves out moves."""
    ends = (18, 22) if warm_up else (4, 8, 12, 16, 20)
    places, _, _ = train(history, lambda step: step <= warm_up or step in ends)
    for step in ends:
        assert stored_place(history, step) == places[step - 1]
        assert stored_place(history, step + 1) == places[step]
