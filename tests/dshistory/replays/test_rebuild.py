"""A step between two checkpoints is rebuilt as it was, verified by what is known of it, or named as not verified."""

import contextlib

import pytest
import torch

import capture
import dshistory
from catalog.errors import NotFoundError, SetupError
from catalog.records import CheckpointRef

STEPS, EVERY = 9, 4


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


class Training:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Dropout(0.2), torch.nn.Linear(300, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.seen = {}

    def step(self, batch):
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def parts(self, **others):
        parts = {"model": self.model, "optimizer": self.optimizer, "train_step": self.step, "dataloader": batch_of}
        return parts | {"quiet": True} | others


def train(history, **options):
    """Train for nine steps and fail then, so that the last step has no checkpoint; return the weights of each."""
    training, weights = Training(), {}
    session = capture.enable(
        training.model, optimizer=training.optimizer, every=EVERY, history=history, stats_every=0, **options
    )
    with contextlib.suppress(KeyError), session:
        for step in range(1, STEPS + 1):
            session.log(loss=training.step(batch_of(step)))
            weights[step] = training.model[0].weight.detach().clone()
        raise KeyError
    return dshistory.Explorer.open(history), session.run, weights


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train(tmp_path_factory.mktemp("recorded") / "history")


@pytest.mark.guards("A replay gives the same bits")
@pytest.mark.parametrize(("verify", "until"), [("step", 6), ("next", 8)])
def test_a_step_without_a_checkpoint_is_rebuilt_and_verified(recorded, verify, until):
    h, run, weights = recorded
    done = h.rebuild(6, verify=verify, **Training().parts())
    assert done.is_verified
    assert done.of == CheckpointRef(run, 4)
    assert done["step"].to_pylist() == list(range(5, until + 1))
    assert torch.equal(h.tensor("0.weight", str(done.rebuilt)), weights[6])
    assert len(h.diff(4, str(done.rebuilt))) > 0
    agreed = "the fingerprints of 2 steps up to it agree (a sample of 3 tensors, all bytes of 13)"
    assert done.verified_by == ((agreed,) if verify == "step" else (agreed, f"{run}:8 comes out of it bit for bit"))
    assert f"step 6 rebuilt from {run}:4 as {done.rebuilt}; verified: " in done.note
    assert h.history.resolve("latest") == CheckpointRef(run, 8), "the rebuilt step is beside the training"


def test_a_step_after_the_last_checkpoint_is_verified_by_its_fingerprint(recorded):
    h, _, weights = recorded
    done = h.rebuild(9, verify="next", **Training().parts())
    assert len(done.verified_by) == 1
    assert torch.equal(h.tensor("0.weight", str(done.rebuilt)), weights[9])


def test_a_step_that_comes_out_otherwise_is_named(recorded):
    h, _, _ = recorded
    done = h.rebuild(7, **Training().parts(dataloader=lambda step: batch_of(step + (step == 6))))
    assert not done.is_verified
    assert done.first_difference == 6
    assert "NOT verified" in done.note
    assert (
        "the fingerprints agree up to step 5 and differ first at step 6: model '0.weight' of rank 0, and " in done.note
    )
    assert h.history.steps(done.rebuilt.run)[-1] == 7, "it is there for whoever wants to look"


def test_a_run_without_fingerprints_is_verified_by_the_next_checkpoint_alone(tmp_path):
    h, run, weights = train(tmp_path / "h", fingerprints=False)
    done = h.rebuild(6, **Training().parts())
    assert done.verified_by == (f"{run}:8 comes out of it bit for bit",)
    assert "the run has no fingerprint of the step" in done.note
    assert torch.equal(h.tensor("0.weight", str(done.rebuilt)), weights[6])
    runs = len(h.history.runs())
    with pytest.raises(SetupError, match=r"step 9 comes after .*:8, the last checkpoint, and has no fingerprint"):
        h.rebuild(9, **Training().parts())
    assert len(h.history.runs()) == runs


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (8, SetupError, "8 is captured: there is nothing to rebuild"),
        (-3, NotFoundError, "step -3 comes before .*:0, the first checkpoint"),
        (1000, SetupError, "step 1000 comes after .*:8, the last checkpoint"),
    ],
)
def test_a_step_that_can_not_be_rebuilt_is_said_before_anything_runs(recorded, step, error, message):
    h, _, _ = recorded
    runs = len(h.history.runs())
    with pytest.raises(error, match=message):
        h.rebuild(step, **Training().parts())
    with pytest.raises(SetupError, match="verify"):
        h.rebuild(6, verify="all", **Training().parts())
    assert len(h.history.runs()) == runs
