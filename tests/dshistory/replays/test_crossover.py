"""A crossover tells bad batches from a bad state, and from a state in which those batches are bad."""

import math

import pytest
import torch

import capture
import dshistory
from catalog.errors import SetupError

BAD = (21, 22)


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(16, 1, generator=generator)


def spoilt(step):
    inputs, targets = batch_of(step)
    return (inputs, targets - 60) if step in BAD else (inputs, targets)


@pytest.fixture
def training(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(batch):
        loss = (model(batch[0]) - batch[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with capture.enable(model, optimizer=optimizer, every=20, history=tmp_path / "h", stats_every=0) as session:
        for number in range(1, 61):
            session.log(loss=step(batch_of(number)))
    parts = {"model": model, "optimizer": optimizer, "train_step": step, "quiet": True}
    return dshistory.Explorer.open(tmp_path / "h"), parts


def test_bad_batches_are_the_data(training):
    h, parts = training
    table = h.crossover(20, 60, batches=BAD, dataloader=spoilt, **parts)
    assert table.verdict == "data", table.note
    assert len(table) == 2 * 6
    suspicious = [row for row in table if row["suspicious"]]
    assert [row["batches"] for row in suspicious] == [list(BAD)] * 2
    assert all(row["effect_size"] > 5 and row["highest_loss"] > 1000 for row in suspicious)
    probes = {step for row in table for step in row["batches"]}
    assert probes == set(range(21, 33))


def test_batches_like_others_are_neither(training):
    h, parts = training
    table = h.crossover(20, 60, batches=BAD, dataloader=batch_of, **parts)
    assert table.verdict == "neither", table.note
    weight = parts["model"].weight.detach().clone()
    assert torch.equal(weight, h.tensor("weight", 20)), "the training is left at a"


def test_a_state_that_no_batch_agrees_with_is_the_state(training):
    h, parts = training
    plain = parts["train_step"]

    capture.restore(40, history=h.root, model=parts["model"], optimizer=parts["optimizer"])
    with capture.enable(parts["model"], optimizer=parts["optimizer"], every=100, history=h.root) as session:
        for number in range(41, 61):
            session.log(loss=plain(batch_of(number)))
        with session.modify():
            parts["optimizer"].param_groups[0]["lr"] = 2.0
        session.log(loss=plain(batch_of(61)))
        session.snapshot()
    for probes in (8, 120):  # With the second number of them no finite loss is left.
        table = h.crossover(f"{session.run}:61", 40, batches=[62], dataloader=batch_of, probes=probes, **parts)
        assert table.verdict == "state", table.note
    assert table[0]["loss_after"] == math.inf


def test_batches_that_are_bad_in_one_state_only_are_both(training):
    h, parts = training
    plain = parts["train_step"]

    def harmful_while_young(batch):
        # The step counts on the weights: far from the solution these batches throw it away, near it they do not.
        inputs, targets = batch
        marked = bool((targets < -30).any())
        far = float((parts["model"].weight - 1).abs().max()) > 0.05
        return plain((inputs, targets if not marked or far else targets + 60))

    table = h.crossover(20, 60, batches=BAD, dataloader=spoilt, **parts | {"train_step": harmful_while_young})
    assert table.verdict == "state and data", table.note
    assert ":20 only" in table.note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, r"batches=\[\]: give the steps"),
        ({"batches": [0]}, r"batches=\[0\]"),
        ({"sets": 2}, "sets=2: give a whole number of at least 3"),
        ({"probes": 0}, "probes=0"),
        ({"dataloader": [1]}, "must be a function that returns the batch of a step"),
        ({"model": None}, "pass train_step="),
        ({"train_step": lambda batch: None}, "returned None"),
        ({"train_step": lambda batch: "x"}, "train_step returned 'x'"),
    ],
)
def test_what_is_missing_is_named(training, options, message):
    h, parts = training
    with pytest.raises(SetupError, match=message):
        h.crossover(20, 60, **{"batches": BAD, "dataloader": batch_of} | parts | options)
