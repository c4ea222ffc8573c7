"""Planted faults are found at the step and in the tensor where they were planted."""

import math
import re
import shutil

import pytest
import torch
from capture_helpers import make, one_step
from explorer_helpers import Run, whole

import capture
import dshistory
from catalog.errors import NotFoundError
from dshistory.explorer import Explorer
from dshistory.trends.statistics_matrix import StatisticsMatrix


def trained(history, fault, *, at=9, steps=12, analyzed=True):
    """Train twelve calm steps, with `fault(model, optimizer)` right after step `at`."""
    model, optimizer = make(128)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0) as session:
        for step in range(1, steps + 1):
            if step == at:
                with session.modify():
                    fault(model, optimizer)
            one_step(model, optimizer)
            session.wait()
    explorer = dshistory.open(history)
    if analyzed:
        explorer.analyze(quiet=True)
    return explorer


def found(explorer):
    return [
        (row["step"], row["anomaly"], row["name"]) for row in explorer.anomalies().details if row["kind"] == "model"
    ]


def test_a_calm_training_has_none(history):
    assert found(trained(history, lambda model, optimizer: None)) == []


def test_the_origin_of_values_that_are_not_finite(history):
    """One weight is NaN after step 9, and the next step spreads it over everything."""

    def fault(model, optimizer):
        with torch.no_grad():
            model.outer.weight[3, 4] = math.nan
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    explorer = trained(history, fault)
    rows = [row for row in explorer.anomalies().details if row["kind"] == "model" and row["anomaly"] == "not finite"]
    assert [(row["step"], row["name"], row["value"]) for row in rows[:1]] == [(9, "outer.weight", 1.0)]
    assert {row["step"] for row in rows[1:]} == {10}
    assert {row["name"] for row in rows} >= {"inner.weight", "outer.bias"}


def test_a_spike_of_the_learning_rate(history):
    def fault(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 100

    rows = found(trained(history, fault))
    assert {step for step, _, _ in rows} == {9}
    assert (9, "large update", "inner.weight") in rows


def test_a_weight_that_goes_to_zero(history):
    def fault(model, optimizer):
        with torch.no_grad():
            model.inner.weight[:100] = 0
            optimizer.param_groups[0]["lr"] = 0.0

    assert (9, "goes to zero", "inner.weight") in found(trained(history, fault))


def test_checkpoints_without_statistics_are_reported(history):
    explorer = trained(history, lambda model, optimizer: None, analyzed=False)
    assert "none of 13 checkpoints has statistics" in repr(explorer.anomalies())


def test_a_missing_run_is_refused(history):
    explorer = trained(history, lambda model, optimizer: None, steps=1)
    with pytest.raises(NotFoundError, match="no run"):
        explorer.anomalies(run="nothing")


def steady(root, steps, *, jump=0.0):
    """Write a tensor that changes equally at every step, and statistics of these steps; the last one adds `jump`."""
    run = Run(root)
    before, per_step = torch.full((4, 32), 10.0), torch.linspace(0.001, 0.002, 128).reshape(4, 32)
    for step in steps:
        run.checkpoint(step, whole({"w": before + step * per_step + (jump if step == steps[-1] else 0)}))
    run.close()
    explorer = Explorer.open(root)
    explorer.analyze(quiet=True)
    return [row["anomaly"] for row in explorer.anomalies().details]


def test_a_longer_gap_between_statistics_is_not_an_anomaly(tmp_path):
    assert steady(tmp_path / "steady", [0, 1, 2, 3, 4, 5, 25]) == []
    assert steady(tmp_path / "jump", [0, 1, 2, 3, 4, 5, 25], jump=5.0) == ["large update", "norm jumps"]


def test_a_warm_up_of_biases_born_at_zero_has_none(history):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )
    for layer in (model[0], model[3]):
        torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
    with capture.enable(model, optimizer=optimizer, scheduler=warm_up, history=history, every=1, stats_every=0):
        for _ in range(15):
            model(torch.randn(32, 16)).square().mean().backward()
            optimizer.step()
            warm_up.step()
            optimizer.zero_grad()
    explorer = dshistory.open(history)
    explorer.analyze(quiet=True)
    assert found(explorer) == []


def test_the_note_says_what_the_value_is(tmp_path):
    steady(tmp_path / "jump", [0, 1, 2, 3, 4, 5, 25], jump=5.0)
    assert Explorer.open(tmp_path / "jump").anomalies().note == (
        "1 event of 2 anomalies in 7 checkpoints; norm jumps: value is the factor between two norms, less for a tensor "
        "that is smaller than typical ones; large update: value is the norm of the update over that of the tensor, at "
        "least a typical one"
    )


def test_noise_in_a_tensor_that_is_nearly_zero_is_none_and_the_most_unusual_comes_first(tmp_path):
    run = Run(tmp_path / "history")
    generator = torch.Generator().manual_seed(0)
    small, quiet, loud = (torch.randn(32, 32, generator=generator) for _ in range(3))
    for step in range(10):
        # The norm of the key's bias grows a hundredfold at the last step, and is noise at every step.
        key = torch.randn(32, generator=generator) * (1e-7 if step == 9 else 1e-9)
        quiet, loud = quiet * (1.08 if step == 9 else 1.01), loud * (2.5 if step == 9 else 1.01)
        run.checkpoint(step, whole({"key.bias": key, "a.weight": quiet, "b.weight": loud, "c.weight": small}))
    run.close()
    explorer = Explorer.open(tmp_path / "history")
    explorer.analyze(quiet=True)
    found = list(explorer.anomalies().details)
    assert [(row["step"], row["name"]) for row in found[:2]] == [(9, "b.weight")] * 2
    assert {row["name"] for row in found} == {"a.weight", "b.weight"}


def test_a_parents_statistics_after_the_fork_are_not_counted(tmp_path):
    parent = Run(tmp_path / "history")
    for step in (0, 1, 2):
        parent.checkpoint(step, whole({"w": torch.ones(4, 32) + step}))
    parent.close()
    explorer = Explorer.open(tmp_path / "history")
    explorer.analyze(quiet=True)
    child = Run(tmp_path / "history", "run-b", parent=("run-a", 0), created="2026-11-22T00:00:00+00:00")
    child.checkpoint(5, whole({"w": torch.ones(4, 32)}))
    child.close()
    assert "in the 1 of 2 checkpoints that have statistics" in explorer.anomalies().note


def test_one_event_is_one_line_and_what_is_local_leads_it(tmp_path):
    """One tensor jumps at step 9, all of them and the loss follow; at step 20 all of them jump, without a culprit."""
    run = Run(tmp_path)
    generator = torch.Generator().manual_seed(0)
    base = {f"h.{number}.w": torch.randn(64, generator=generator) for number in range(20)}
    for step in range(1, 24):
        for name in base:
            far = (step == 9 and name == "h.3.w") or step in (10, 20)
            base[name] = base[name] * (3.0 if far else 1.001)
        run.checkpoint(step, whole(base), loss=9.0 if step == 10 else 2.0 + 0.01 * (step % 3))
    run.close()
    explorer = Explorer.open(tmp_path)
    explorer.analyze(quiet=True)
    table = explorer.anomalies()
    first = table[0]
    assert (first["step"], first["kind"], first["name"]) == (9, "model", "h.3.w")
    assert "loss rises (10)" in first["also"]
    assert re.search(r"large update: (19|20) tensors \(\d+\)", first["also"]) or "norm jumps: 20" in first["also"]
    assert len(table) == 1, "an anomaly counts once for each tensor"
    assert len(table.event(1)) == len(table.details) > 20
    with pytest.raises(NotFoundError, match="event 7: there are 1"):
        table.event(7)


def test_a_learning_rate_leads_what_it_did(history):
    def fault(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 100

    table = trained(history, fault).anomalies()
    assert len(table) == 1
    assert (table[0]["step"], table[0]["kind"], table[0]["name"]) == (9, "metric", "lr")
    assert table[0]["value"] == pytest.approx(1e-2)
    assert "large update: " in table[0]["also"]


def steps_of(root, *, spike_at=None):
    """Write a run of ten calm steps, one of which may be a jump, and leave it open."""
    run = Run(root)
    for step in range(1, 11):
        run.checkpoint(step, whole(calm(step, spike=step == spike_at)))
    return run


def calm(step, *, spike=False):
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(64, generator=generator) * 1e-3
    return {"h.0.w": torch.linspace(1, 2, 64) * (1 + 0.001 * step) + noise + (5.0 if spike else 0.0)}


def rows_and_note(explorer):
    table = explorer.anomalies()
    return list(table.details), table.note


def test_cached_anomalies_equal_those_of_a_new_explorer(tmp_path, monkeypatch):
    run = steps_of(tmp_path)
    explorer = Explorer.open(tmp_path)
    explorer.analyze(quiet=True)
    assert rows_and_note(explorer) == rows_and_note(Explorer.open(tmp_path))
    asked = []
    whole_of = StatisticsMatrix.all.__func__
    monkeypatch.setattr(
        StatisticsMatrix,
        "all",
        classmethod(lambda cls, h, ask, refs: asked.append(len(refs)) or whole_of(cls, h, ask, refs)),
    )
    run.checkpoint(11, whole(calm(11, spike=True)))
    run.checkpoint(12, whole(calm(12)))
    explorer.analyze(quiet=True)
    rows, note = rows_and_note(explorer)
    assert asked == [2], "only the new ones are asked for"
    assert {row["step"] for row in rows} == {11}
    assert rows_and_note(explorer) == (rows, note)
    assert asked == [2], "and nothing when nothing is new"
    assert rows_and_note(Explorer.open(tmp_path)) == (rows, note)
    run.close()


def test_inserted_and_removed_statistics_are_noticed(tmp_path):
    run = steps_of(tmp_path, spike_at=7)
    explorer = Explorer.open(tmp_path)
    for step in (1, 2, 3, 4, 5, 6, 8, 9, 10):
        explorer.analyze(step, quiet=True)
    assert {row["step"] for row in explorer.anomalies().details} == set()
    explorer.analyze(7, quiet=True)
    assert {row["step"] for row in explorer.anomalies().details} == {7}
    shutil.rmtree(explorer.history.paths.step_dir(run.run, 7))
    assert rows_and_note(explorer) == rows_and_note(Explorer.open(tmp_path))
    run.checkpoint(11, whole(calm(11) | {"h.1.w": torch.ones(64)}))
    explorer.analyze(quiet=True)
    assert rows_and_note(explorer) == rows_and_note(Explorer.open(tmp_path))
    run.close()
