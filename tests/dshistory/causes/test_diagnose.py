"""Planted causes are the first that `diagnose` names, with their step and tensors, and a healthy training has none."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from explorer_helpers import Run, whole

import capture
import dshistory
from benchmarks.diagnose import is_right
from benchmarks.planted import CAUSES, Case, Truth, train
from catalog.errors import NotFoundError
from catalog.lineage_batches import lineage_batches
from dshistory.causes.diagnose import _folded, _follows, _ranked
from dshistory.causes.findings import Finding
from dshistory.causes.metric_findings import learning_rate_findings
from dshistory.causes.record import Record, Series
from dshistory.causes.robust import CLEAR, excess
from dshistory.explorer import Explorer

SAMPLE = [
    Case("nothing", True, 10, 1),
    Case("learning rate", True, 10, 2),
    Case("bad batch", True, 1, 3),
    Case("optimizer state reset", True, 1, 60, "SGD"),
    Case("optimizer state reset", True, 5, 2380, "SGD"),
    Case("bad batch", False, 1, 2170, "SGD"),
    Case("clipping off", True, 5, 3040, "Adam"),
    Case("norm grows", True, 1, 3001, "SGD"),
    Case("nothing", False, 1, 2501, "SGD"),
    pytest.param(Case("layer corrupted", True, 10, 4), marks=pytest.mark.long),
    pytest.param(Case("optimizer state reset", False, 10, 2860, "SGD"), marks=pytest.mark.long),
    pytest.param(Case("foreign optimizer state", False, 5, 2550, "SGD"), marks=pytest.mark.long),
    pytest.param(Case("nothing", True, 10, 2641, "SGD"), marks=pytest.mark.long),
    pytest.param(Case("nothing", False, 10, 1710, "SGD"), marks=pytest.mark.long),
    pytest.param(Case("norm grows", False, 1, 3290), marks=pytest.mark.long),
    pytest.param(Case("clipping off", False, 1, 210, "SGD"), marks=pytest.mark.long),
]
"""`python -m benchmarks diagnose` has every cause."""


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.cause}, {case.optimizer} every {case.every}")
def test_the_first_row_is_what_was_planted(tmp_path, case):
    truth = train(tmp_path, case)
    explorer = dshistory.open(tmp_path)
    explorer.analyze(quiet=True)
    table = explorer.diagnose(quiet=True)
    assert is_right(case, truth, list(table)), repr(table)
    json.loads(table.to_json())
    for row in table:
        # Every call is one that a person can paste.
        eval(row["call"], {"h": explorer})
    if case.cause == "bad batch":
        batches = lineage_batches(explorer.history.paths, explorer.log()[0]["run"])
        assert table[0]["evidence"].endswith(f"; its batch is {batches[truth.step][0].digest}")
    if case.cause == "learning rate":
        assert explorer.diagnose(truth.step, quiet=True)[0]["cause"] == "learning rate"
        assert "learning rate" not in explorer.diagnose(truth.step - 1, quiet=True)["cause"].to_pylist()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.8, "dampening": 0.5}], ids=["", "dampened"])
def test_the_energy_of_gradients_follows_from_momentum_buffers(tmp_path, every, options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, **options)
    squares = {}
    with capture.enable(model, optimizer=optimizer, every=every, history=tmp_path, stats_every=0):
        for step in range(1, 61):
            optimizer.zero_grad()
            (model.weight * torch.randn(32, 64)).sum().backward()
            if step == 41:
                model.weight.grad *= 4
            squares[step] = float(model.weight.grad.square().sum())
            optimizer.step()
    explorer = dshistory.open(tmp_path)
    explorer.analyze(quiet=True)
    record = Record(explorer.history, None)
    row = list(record.weights).index("weight")
    left, ratios = options["momentum"] ** 2, []
    for at, ref in enumerate(record.analyzed):
        if at < 2:
            continue
        shares = {step: left ** (ref.step - step) for step in range(ref.step - every + 1, ref.step + 1)}
        real = sum(squares[step] * share for step, share in shares.items()) / sum(shares.values())
        ratios.append(record.energy[row, at] / real)
    # A sketch of 256 buckets gives a square to 9 %, and gradients drawn at random are nearly across each other.
    assert ratios == pytest.approx([1.0] * len(ratios), rel=0.4)
    assert np.mean(ratios) == pytest.approx(1.0, rel=0.06)
    assert int(np.nanargmax(record.energy[row])) == [ref.step >= 41 for ref in record.analyzed].index(True)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_without_a_momentum_that_fades_nothing_is_said_of_gradients(tmp_path, momentum):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)
    with capture.enable(model, optimizer=optimizer, every=1, history=tmp_path, stats_every=0):
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    explorer = dshistory.open(tmp_path)
    explorer.analyze(quiet=True)
    assert not np.isfinite(Record(explorer.history, None).energy).any()
    assert list(explorer.diagnose(quiet=True)) == []


def test_a_history_without_optimizer_or_statistics_says_what_was_not_checked(tmp_path):
    run = Run(tmp_path)
    for step in range(1, 10):
        run.checkpoint(step, whole({"w": torch.full((4, 8), float(step))}))
    run.close()
    table = Explorer.open(tmp_path).diagnose(quiet=True)
    assert len(table) == 0
    assert table.note == (
        "nothing found in 9 checkpoints, 0 of which were audited; not checked: 9 checkpoints without statistics "
        "(`analyze` computes them), the loss, which was not recorded, the optimizer, which was not captured"
    )
    with pytest.raises(NotFoundError, match="no run 'run-z'"):
        Explorer.open(tmp_path).diagnose(run="run-z", quiet=True)


def test_the_steps_before_a_fork_are_on_record_also_where_the_child_has_captured_it_again(tmp_path):
    root = tmp_path / "history"
    training = Run(root, "training", facts={"number": 1})
    training.checkpoint(0, whole({"w": torch.zeros(2)}))
    for step in range(1, 16):
        training.metrics(step, loss=float(step))
    training.checkpoint(10, whole({"w": torch.ones(2)}))
    training.close()
    child = Run(root, "child", parent=("training", 10), facts={"number": 2})
    child.checkpoint(10, whole({"w": torch.ones(2)}))
    for step in range(11, 13):
        child.metrics(step, loss=100.0 + step, stall_s=1.0)
    child.close()
    metrics = Record(Explorer.open(root).history, "child").metrics
    assert list(metrics) == ["loss"]
    assert metrics["loss"].steps.tolist() == list(range(1, 13))
    assert metrics["loss"].values[9:].tolist() == [10.0, 111.0, 112.0]


def test_one_outlier_does_not_hide_itself_and_noise_is_no_surprise():
    noise = np.random.default_rng(0).normal(size=(20, 200))
    assert np.abs(excess(noise, least=1e-9)).max() < CLEAR
    noise[3, 77] += 20
    assert np.unravel_index(excess(noise, least=1e-9).argmax(), noise.shape) == (3, 77)
    assert not excess(np.full((2, 50), 3.0), least=1e-9).any()
    assert not excess(np.array([1.0, 9.0]), least=1e-9).any(), "too few to know what is usual"


def test_what_drifts_is_no_surprise_at_once():
    values = np.concatenate([np.sin(np.arange(30.0)) / 100, -np.arange(1, 7) / 5])
    plain, sudden = (excess(values, least=1e-9, at_once=at_once)[-1] for at_once in (False, True))
    assert plain < -CLEAR
    assert abs(sudden) < abs(plain) / 2, "the last step of a drift is only one of its steps"
    values[10] -= 1
    both = [excess(values, least=1e-9, at_once=at_once)[10] for at_once in (False, True)]
    assert max(both) < -CLEAR, "a drop is one either way"
    assert both[0] <= both[1]


def finding(cause, step, **more):
    return Finding(cause, step - 1, step, ["w"], "why", "h.log()", **more)


def test_what_a_cause_brought_about_is_folded_into_its_row():
    rate, broken = finding("learning rate", 30), finding("not finite", 31)
    batch = finding("bad batch", 31, certain=False, surprise=90.0)
    later, other = finding("bad batch", 80, certain=False, surprise=9.0), finding("layer corrupted", 32)
    folded = _folded(_ranked([broken, batch, rate, later, other]))
    assert [each.cause for each in folded] == ["learning rate", "layer corrupted", "bad batch"]
    assert folded[rate] == [broken, batch]
    assert folded[later] == [], "far from both"


def test_a_long_history_is_diagnosed_without_opening_every_checkpoint(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture.enable(model, optimizer=optimizer, every=1, history=tmp_path, stats_every=0):
        for _ in range(160):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    explorer = dshistory.open(tmp_path)
    explorer.analyze(quiet=True)
    opened = []
    of_place = Record.rules
    monkeypatch.setattr(Record, "rules", lambda self, place: opened.append(place) or of_place(self, place))
    explorer.diagnose(quiet=True)
    assert len(set(opened)) < 120


def test_a_cause_comes_before_what_it_brings_about():
    found = [
        finding("not finite", 31),
        finding("learning rate", 30),
        finding("bad batch", 31, certain=False, surprise=90.0),
        finding("layer corrupted", 30, certain=False, surprise=9.0),
    ]
    assert [each.cause for each in _ranked(found)] == ["learning rate", "not finite", "layer corrupted", "bad batch"]
    assert [each.cause for each in _ranked([found[0], found[2]])] == ["bad batch", "not finite"]


def test_weights_that_jump_as_the_state_is_reset_are_its_doing():
    corrupted, reset = finding("layer corrupted", 30), finding("optimizer state reset", 30)
    assert _ranked([corrupted, reset]) == [reset, corrupted]
    elsewhere = finding("optimizer state reset", 31)
    assert _ranked([elsewhere, corrupted]) == [corrupted, elsewhere]


def rates_out_of_line(rates):
    record = SimpleNamespace(metrics={"lr": Series(np.arange(len(rates)), np.array(rates))})
    return [each.step for each in learning_rate_findings(record)]


def test_a_rate_that_falls_for_one_step_is_out_of_line_and_a_schedules_fall_is_not():
    assert rates_out_of_line([1.0] * 8 + [0.0] + [1.0] * 8) == [8]
    assert rates_out_of_line([1.0] * 8 + [0.1] * 9) == []
    cosine = [0.5 + 0.5 * np.cos(np.pi * step / 20) for step in range(20)]
    assert rates_out_of_line([*cosine, *cosine]) == [], "a warm restart"


def test_a_limit_on_gradients_that_is_tightened_is_no_bad_batch(tmp_path, monkeypatch):
    def tightened(training):
        good = training.batch

        def batch(step):
            training.clip = 0.02 if step >= training.at else training.clip
            return good(step)

        training.batch = batch
        return Truth()

    monkeypatch.setitem(CAUSES, "clipping tightened", tightened)
    train(tmp_path, Case("clipping tightened", True, 1, 4562))
    explorer = dshistory.open(tmp_path)
    explorer.analyze(quiet=True)
    assert "bad batch" not in explorer.diagnose(quiet=True)["cause"].to_pylist()


def test_a_loss_is_of_its_batch_unless_weights_clearly_jumped_before():
    batch = finding("bad batch", 31, certain=False, surprise=6.5)
    for cause in ("learning rate of a group", "dead units"):
        assert not _follows(batch, finding(cause, 31, certain=False, surprise=CLEAR)), cause
        assert _follows(batch, finding(cause, 31, certain=False, surprise=CLEAR + 1)), cause
        assert _follows(batch, finding(cause, 31)), cause
    died, killed = (finding("dead units", 31, certain=False, surprise=CLEAR + more) for more in (0, 1))
    assert _follows(died, batch)
    assert not _follows(killed, batch)
