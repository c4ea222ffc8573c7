"""A diff from sketches is immediate, labelled and within its bound, and is not used where sketches cannot tell."""

import math

import numpy as np
import pytest
import torch
from capture_helpers import make, one_step

import capture
import dshistory
from dshistory.comparison import diff
from dshistory.trends import trajectory


def step_without_gradients(model, optimizer):
    """Advance the step's number, and the values that momentum still changes."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.fixture
def explorer(history):
    """Return six analysed steps of a training; at the last one a weight is NaN."""
    model, optimizer = make(256)
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0) as session:
        for _ in range(5):
            one_step(model, optimizer)
        session.wait()
        with session.modify(), torch.no_grad():
            model.outer.weight[3, 4] = math.nan
        step_without_gradients(model, optimizer)
    found = dshistory.open(history)
    found.analyze(quiet=True)
    return found


def by_name(table):
    return {(row["kind"], row["name"]): row for row in table}


def test_small_histories_are_compared_exactly(explorer):
    assert set(explorer.diff(1, 5, kinds="*", quiet=True)["bound"].to_pylist()) == {0.0}


def test_small_tensors_are_exact_beside_estimates_of_large_ones(explorer, monkeypatch):
    exact = by_name(explorer.diff(1, 5, exact=True, quiet=True))
    monkeypatch.setattr(diff, "AT_ONCE_BYTES", 0)
    rows = by_name(explorer.diff(1, 5, quiet=True))
    assert rows["model", "inner.weight"]["bound"] > 0
    of_others = {"times_usual": None}
    assert rows["model", "inner.bias"] | of_others == exact["model", "inner.bias"] | of_others


def test_nothing_is_read_for_tensors_with_sketches(explorer, monkeypatch):
    exact = by_name(explorer.diff(1, 5, kinds=["model", "exp_avg*"], exact=True, quiet=True))
    monkeypatch.setattr(diff, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(diff, "SMALL_BYTES", 0)

    def never(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(diff, "compare", never)
    table = explorer.diff(1, 5, kinds=["model", "exp_avg*"], quiet=True)
    rows = by_name(table)
    assert rows.keys() == exact.keys()
    assert f"{len(rows)} estimated from sketches" in repr(table)
    off = {}
    for key, row in rows.items():
        assert 0.12 < row["bound"] < 0.14
        for figure in ("norm_before", "norm_after"):
            assert row[figure] == pytest.approx(exact[key][figure], rel=1e-6)
        for figure in ("max_change", "sign_flips", "changed_share"):
            assert row[figure] is None, "what sketches can't tell is unknown"
        off[key] = abs(row["update_norm"] / exact[key]["update_norm"] - 1)
        assert row["cosine"] == pytest.approx(exact[key]["cosine"], abs=0.25 * (1 - exact[key]["cosine"] ** 2) + 1e-6)
    assert sum(error <= rows[key]["bound"] for key, error in off.items()) >= 0.9 * len(off), off
    assert any(off.values()), "exact figures are no estimates"


def test_tensors_that_sketches_cannot_estimate_are_read(explorer, monkeypatch):
    exact = by_name(explorer.diff(5, 6, exact=True, quiet=True))
    monkeypatch.setattr(diff, "AT_ONCE_BYTES", 0)
    rows = by_name(explorer.diff(5, 6, quiet=True))
    broken = rows["model", "outer.weight"]
    assert broken == exact["model", "outer.weight"]
    assert (broken["nonfinite_after"], broken["bound"]) == (1, 0.0)
    assert rows["model", "inner.weight"]["bound"] > 0


def test_without_statistics_the_tensors_are_read(history, monkeypatch):
    model, optimizer = make(256)
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0):
        one_step(model, optimizer)
    monkeypatch.setattr(diff, "AT_ONCE_BYTES", 0)
    assert set(dshistory.open(history).diff(0, 1, quiet=True)["bound"].to_pylist()) == {0.0}


def test_an_update_that_drowns_in_the_rounding_of_sketches_is_read(history, monkeypatch):
    model, optimizer = make(256)
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0) as session:
        optimizer.param_groups[0]["weight_decay"] = 0.0
        session.wait()
        with session.modify(), torch.no_grad():
            model.inner.weight[0, 0] += 1e-7
        step_without_gradients(model, optimizer)
    explorer = dshistory.open(history)
    explorer.analyze(quiet=True)
    monkeypatch.setattr(diff, "AT_ONCE_BYTES", 0)
    row = by_name(explorer.diff(0, 1, quiet=True))["model", "inner.weight"]
    assert row["bound"] == 0.0
    assert row["changed_share"] == 1 / 256**2


def test_a_trajectory_uses_known_statistics(explorer, monkeypatch):
    exact = {
        metric: explorer.trajectory(metric=metric, exact=True, quiet=True).to_pandas()
        for metric in ("norm", "update_norm", "changed_share")
    }
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    norms = explorer.trajectory(metric="norm", quiet=True)
    assert norms.to_pandas()["value"].to_numpy() == pytest.approx(exact["norm"]["value"].to_numpy(), rel=1e-9)
    updates = explorer.trajectory(metric="update_norm", quiet=True)
    assert "estimated" in repr(updates)
    values, true = (table["value"].to_numpy() for table in (updates.to_pandas(), exact["update_norm"]))
    assert values == pytest.approx(true, rel=0.3, nan_ok=True)
    assert (values != true)[~np.isnan(true)].any()
    shares = explorer.trajectory(metric="changed_share", quiet=True)
    assert "estimated" not in repr(shares)
    assert shares.to_pandas().equals(exact["changed_share"])
