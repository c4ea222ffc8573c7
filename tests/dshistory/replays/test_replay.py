"""A replay makes the same bits again, says where and why it does not, and changes what it is asked to change."""

import random
import re
import signal
import sys

import numpy as np
import pytest
import torch

import capture
import dshistory
from catalog.errors import MismatchError, SetupError
from catalog.records import CheckpointRef

STEPS = 12
EVERY = 4


class Batches:
    """A loader that knows its position, as torchdata's does."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        while self.position % 30 or self.position == 0:
            self.position += 1
            yield batch_of(self.position)
        self.position += 1


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


class Training:
    """A training that draws random numbers of three kinds, and moves its rate by a schedule."""

    def __init__(self, *, lr=1e-2):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.loader = Batches()
        self.rates = []

    def parts(self, **others):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
            "train_step": self.step,
            "quiet": True,
        } | others

    def step(self, batch):
        inputs, targets = batch
        noise = random.random() + np.random.rand()
        loss = (self.model(inputs) - targets + 0.01 * noise).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        hook = self.optimizer.register_step_pre_hook(lambda *_: self.rates.append(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.step()
        hook.remove()
        self.scheduler.step()
        return loss


def train(history, training, *, left_out=(), steps=STEPS, **options):
    with capture.enable(
        training.model,
        optimizer=training.optimizer,
        scheduler=None if "scheduler" in left_out else training.scheduler,
        dataloader=None if "dataloader" in left_out else training.loader,
        every=EVERY,
        history=history,
        stats_every=0,
        **options,
    ) as session:
        for batch in training.loader:
            session.log(loss=training.step(batch))
            if session.step == steps:
                break
    return session


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    history = tmp_path_factory.mktemp("recorded") / "history"
    session = train(history, Training())
    return dshistory.Explorer.open(history), session.run


@pytest.mark.guards("A replay gives the same bits")
@pytest.mark.parametrize("begin", [0, 4, 8])
def test_a_replay_is_bit_identical(recorded, begin):
    h, _ = recorded
    random.seed(9), np.random.seed(9)
    replayed = h.replay(begin, **Training(lr=0.5).parts())
    assert replayed.parted is None
    assert replayed.identical_until == STEPS
    assert f"bit-identical up to step {STEPS}: {(STEPS - begin) // EVERY} checkpoints" in replayed.note
    assert replayed["step"].to_pylist() == list(range(begin + 1, STEPS + 1))
    assert set(replayed["difference"].to_pylist()) == {0.0}
    assert replayed["differing"].to_pylist()[-1] == 0
    assert h.history.run_facts(replayed.run).parent_step == begin


@pytest.mark.guards("A replay gives the same bits")
def test_a_replay_begins_at_a_step_of_a_redo_log(tmp_path):
    run = train(tmp_path / "history", Training(), redo=True).run
    random.seed(9), np.random.seed(9)
    h = dshistory.Explorer.open(tmp_path / "history")
    replayed = h.replay(6, **Training(lr=0.5).parts())
    assert (replayed.parted, replayed.identical_until) == (None, STEPS)
    facts = h.history.run_facts(replayed.run)
    assert (facts.parent_run, facts.parent_step) == (run, 6)


def test_a_replay_never_becomes_the_current_run(recorded):
    h, run = recorded
    replayed = h.replay(8, **Training().parts())
    assert replayed.run != run
    assert h.history.resolve("latest") == CheckpointRef(run, STEPS)
    assert set(h.sql("SELECT DISTINCT run FROM lineage")["run"].to_pylist()) == {run}
    assert h.history.run_facts(replayed.run).facts["replay"]["of"] == f"{run}:8"


@pytest.mark.filterwarnings("error")
def test_batches_may_be_a_function_of_the_step(recorded):
    h, _ = recorded
    assert h.replay(4, **Training().parts(dataloader=batch_of)).parted is None
    skipping = Training()
    seen = []
    changed = h.replay(
        4, **skipping.parts(dataloader=lambda step: (seen.append(step), batch_of(step))[1]), skip_batches="6-7", until=8
    )
    assert seen == [5, 8, 9, 10]
    assert changed.parted_at == 8
    assert changed.other_batch_at == 6


def test_another_bit_is_found_at_its_step_tensor_rank_and_element(recorded):
    h, _ = recorded
    training = Training()

    def nudged(batch):
        loss = training.step(batch)
        if training.loader.position == 10:
            with torch.no_grad():
                training.model[3].weight[0, 5] += 0.5
        return loss

    replayed = h.replay(4, **training.parts(train_step=nudged))
    assert replayed.identical_until == 10, "fingerprints tell it for steps without a checkpoint too"
    assert replayed.first_difference == 11
    assert "differ first at step 11: model '0.weight' of rank 0, and " in replayed.note
    assert replayed.parted_at == 12
    first = replayed.parted.first
    assert (first.kind, first.rank) == ("model", 0)
    expected = h.tensor(first.name, 12), h.tensor(first.name, f"{replayed.run}:12")
    assert first.before == expected[0][first.index].item() != first.after == expected[1][first.index].item()
    assert replayed["step"].to_pylist()[[bool(one) for one in replayed["difference"].to_pylist()].index(True)] == 11
    assert "the loss differs first at step 11" in replayed.note
    assert "no cause is on record" in replayed.note


@pytest.mark.guards("A replay gives the same bits")
@pytest.mark.parametrize("left_out", ["scheduler", "dataloader", "threads", "flag"])
def test_each_part_that_is_left_out_is_named(tmp_path, left_out, monkeypatch):
    monkeypatch.setattr("capture.loops.pytorch.loop.warn_user", lambda text: None)
    train(tmp_path / "h", Training(), left_out=[left_out])
    h = dshistory.Explorer.open(tmp_path / "h")
    training = Training(lr=0.3) if left_out == "scheduler" else Training()
    parts = training.parts()
    if left_out == "scheduler":
        parts["scheduler"] = None
    elif left_out == "dataloader":
        with pytest.raises(MismatchError, match=r":4 has no position of a data loader"):
            h.replay(4, **parts)
        parts["dataloader"] = lambda step: batch_of(step - 4)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        if left_out == "threads":
            torch.set_num_threads(threads + 1)
        elif left_out == "flag":
            torch.set_float32_matmul_precision("medium")
        if left_out in ("threads", "flag"):
            parts["dataloader"] = lambda step: batch_of(step + 100)
        replayed = h.replay(4, **parts)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    named = {
        "scheduler": "the learning rate scheduler was not captured",
        "dataloader": "the position of the data loader was not captured",
        "threads": f"threads.intra op is {threads + 1}, was {threads}",
        "flag": "flags.float32 matmul precision is 'medium', was 'highest'",
    }
    causes = replayed.note.partition("likely cause: ")[2].split("; ")
    assert named[left_out] in causes
    # What was planted for the threads and the flag, which change no bit of so small a model, is named before them.
    assert ("step 5 was given another batch than before" in causes[:1]) == (left_out != "scheduler")
    missing = [row["what"] for row in h.reproducibility() if row["status"] == "not captured"]
    assert ("position of the data loader" in missing) == (left_out == "dataloader")
    assert ("learning rate scheduler" in missing) == (left_out == "scheduler")


def test_another_rate_and_other_arguments_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "here/train.py", "--lr", "0.05"])
    train(tmp_path / "h", Training())
    monkeypatch.setattr(sys, "orig_argv", ["python", "there/train.py"])
    training = Training()

    def warmer(batch):
        if training.loader.position == 7:
            training.optimizer.param_groups[0]["lr"] *= 2
        return training.step(batch)

    replayed = dshistory.Explorer.open(tmp_path / "h").replay(4, **training.parts(train_step=warmer))
    causes = replayed.note.partition("likely cause: ")[2].split("; ")
    assert causes == [
        f"step 7 was made with the learning rate {training.rates[2]!r}, before with {training.rates[2] / 2!r}",
        "the arguments of train.py are none, were --lr 0.05",
    ]


def test_learning_rates_are_changed_for_every_update_and_only_there(recorded):
    h, _ = recorded
    scheduled, halved, fixed = Training(), Training(), Training()
    h.replay(4, **scheduled.parts())
    replayed = h.replay(4, **halved.parts(), change={"lr_scale": 0.5})
    h.replay(4, **fixed.parts(), change=["lr=0.002"])
    assert halved.rates == pytest.approx([rate / 2 for rate in scheduled.rates], rel=1e-12)
    assert fixed.rates == [0.002] * 8
    assert halved.scheduler.state_dict() == scheduled.scheduler.state_dict()
    assert "changed: lr_scale 0.5" in replayed.note
    assert f"parts at step {8}" in replayed.note
    logged = h.sql("SELECT value FROM metrics WHERE run = $run AND name = 'lr' ORDER BY step", run=replayed.run)
    assert logged["value"].to_pylist() == pytest.approx(halved.rates)


def test_groups_state_and_seed_are_changed(recorded):
    h, _ = recorded
    training = Training()
    change = {"betas": (0.5, 0.6), "weight_decay": 0.25, "seed": 3, "reset_optimizer": True}
    replayed = h.replay(8, **training.parts(), change=change, until=9)
    assert training.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert training.optimizer.param_groups[0]["weight_decay"] == 0.25
    assert {float(state["step"]) for state in training.optimizer.state.values()} == {1.0}
    before = dshistory.Explorer.open(h.root).restore(f"{replayed.run}:8")
    assert all(not bool(value.any()) for value in before["exp_avg"].values())
    assert h.history.run_facts(replayed.run).facts["replay"]["change"] == {**change, "betas": [0.5, 0.6]}


def test_a_function_may_change_anything(recorded):
    h, _ = recorded

    def without_first_layer(model, optimizer):
        with torch.no_grad():
            model[0].weight.zero_()

    replayed = h.replay(8, **Training().parts(), change=without_first_layer)
    assert not h.tensor("0.weight", f"{replayed.run}:8").any()
    assert "without_first_layer" in replayed.note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until": 4}, "until=4 is not after step 4"),
        ({"skip_batches": [3]}, r"skip_batches=\[3\]: the replay makes steps 5 to 12 only"),
        ({"skip_batches": "x"}, "give steps, as 83 or 83-90"),
        ({"change": {"lr_sclae": 0.5}}, "there is no 'lr_sclae'; the nearest is lr_scale"),
        ({"change": ["lr_scale"]}, "'lr_scale' is not NAME=VALUE"),
        ({"change": {"lr": float("nan")}}, "lr=nan: give a finite number"),
        ({"change": {"betas": (0.9, 1.0)}}, "betas=1.0: give a number from 0 to below 1"),
        ({"change": {"momentum": 0.9}}, "AdamW has no momentum in any parameter group"),
        ({"dataloader": [1, 2]}, "a list can't tell its position"),
        ({"dataloader": None}, "pass dataloader="),
        ({"train_step": None}, "give what trains"),
        ({"command": ["true"]}, "not both"),
        ({"model": None}, "pass engine=, or model="),
        ({"batches_per_step": 0}, "batches_per_step=0"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(recorded, options, message):
    h, _ = recorded
    runs = len(h.history.runs())
    with pytest.raises(SetupError, match=message):
        h.replay(4, **Training().parts(**options))
    assert len(h.history.runs()) == runs


def test_a_function_that_makes_no_step_is_named_and_not_called_for_ever(recorded):
    h, _ = recorded
    with pytest.raises(SetupError, match="train_step was called 1000 times behind step 4, and has made no step"):
        h.replay(4, **Training().parts(train_step=lambda batch: None))


def test_ctrl_c_leaves_a_valid_child(recorded):
    h, _ = recorded
    training = Training()

    def interrupted(batch):
        if training.loader.position == 10:
            signal.raise_signal(signal.SIGINT)
        return training.step(batch)

    with pytest.raises(KeyboardInterrupt):
        h.replay(4, **training.parts(train_step=interrupted))
    child = h.history.runs()[-1].run
    assert h.history.steps(child) == [4, 8]
    assert not len(h.verify(f"{child}:8", quiet=True))


def test_it_draws_itself(recorded):
    h, _ = recorded
    figure = h.replay(8, **Training().parts(), change={"lr": 0.0}).plot()
    assert [len(trace.y) for trace in figure.data] == [4, 4]


def test_steps_are_replayed_at_random(recorded):
    h, _ = recorded
    parts = Training().parts()
    checked = h.replay_check(2, seed=0, **parts)
    assert checked["identical"].to_pylist() == [True, True]
    assert "2 of 2 replays give the same bits" in checked.note
    training = Training()

    wrong = h.replay_check(
        1, seed=0, **training.parts(train_step=lambda batch: training.step((batch[0] + 1, batch[1])))
    )
    assert wrong["identical"].to_pylist() == [False]
    assert wrong["first"].to_pylist()[0].startswith("0.bias[0] of rank 0: ")
    assert re.search(r"1 of 1 replays differ: likely cause: step \d+ was given another batch than before$", wrong.note)

    training.model[3].weight.register_hook(lambda gradient: 1.5 * gradient)
    broken = h.replay_check(1, seed=0, **training.parts())
    assert "1 of 1 replays differ: where kernels are deterministic" in broken.note
    assert "faulty hardware or a race" in broken.note
    with pytest.raises(SetupError, match="count=0"):
        h.replay_check(0, **parts)
