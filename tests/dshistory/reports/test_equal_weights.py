"""Weights that are published under two steps are named by verify, and only where updates should have moved them."""

import copy

import pytest
import torch
from catalog_helpers import meanwhile

import capture
import dshistory
from catalog.records import CheckpointRef
from catalog.retention.prune import remove
from dshistory.reports import equal_weights


def train(history, *, put_back_at=None, rate=0.1, steps=6):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    kept = None
    with capture.enable(model, optimizer=optimizer, every=2, history=history, stats_every=0) as session:
        for step in range(1, steps + 1):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                kept = copy.deepcopy(model.state_dict())
            if step == put_back_at:
                with session.modify():
                    model.load_state_dict(kept)
    return dshistory.Explorer.open(history), session.run


@pytest.mark.guards("Damage is found and named")
def test_a_step_with_the_weights_of_another_is_named(tmp_path):
    h, run = train(tmp_path / "h", put_back_at=6)
    (row,) = h.verify(quiet=True)
    assert row["file"] == f"runs/{run}/steps/000000000006"
    assert row["field"] == "weights"
    assert row["problem"].startswith("step 6 holds the weights of step 2, byte for byte, although 4 updates")
    assert len(h.verify(6, quiet=True)) == 1
    assert len(h.verify(4, quiet=True)) == 0


def test_weights_that_nothing_should_have_moved_are_no_problem(tmp_path):
    h, _ = train(tmp_path / "h", rate=0.0)
    assert len(h.verify(quiet=True)) == 0
    train(tmp_path / "h")
    assert len(h.verify(quiet=True)) == 0, "steps of different runs are not compared"


def test_a_step_that_is_removed_meanwhile_is_not_compared(tmp_path, monkeypatch):
    h, run = train(tmp_path / "h", put_back_at=6)
    gone = CheckpointRef(run, 6)

    def removes():
        assert remove(h.history, [gone], force=True, dry_run=False).removed

    happened = meanwhile(monkeypatch, equal_weights, "pinned", removes)
    assert list(equal_weights.equal_weights(h.history, h.history.checkpoints())) == []
    assert happened
