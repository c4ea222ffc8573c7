"""A tensor without one finite element has no norm and no update: both are unknown everywhere, never zero."""

import math

import pytest
import torch
from explorer_helpers import Run, whole

from dshistory.explorer import Explorer

NUMBERS = ("relative_update", "update_norm", "cosine", "max_change", "sign_flips", "norm_before", "norm_after")


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    """All of `layer.0.a` and one row of `layer.0.b` are not finite at step 20."""
    run = Run(tmp_path_factory.mktemp("nonfinite") / "history")
    weights = {"layer.0.a": torch.ones(4, 8), "layer.0.b": torch.ones(4, 8)}
    for step in (0, 10, 20):
        weights = {name: weight + 1 for name, weight in weights.items()}
        if step == 20:
            weights["layer.0.a"] = torch.full((4, 8), math.nan)
            weights["layer.0.b"][2] = math.inf
        run.checkpoint(step, whole(weights))
    run.close()
    return Explorer.open(run.root)


@pytest.fixture
def analyzed(explorer: Explorer) -> Explorer:
    explorer.analyze(quiet=True)
    return explorer


def test_a_diff_knows_only_the_counts(explorer: Explorer) -> None:
    row = explorer.diff(10, 20, names="layer.0.a", quiet=True)[0]
    assert {row[name] for name in NUMBERS} == {None}
    assert (row["nonfinite_before"], row["nonfinite_after"], row["changed_share"]) == (0, 32, 1.0)
    assert explorer.diff(10, 20, names="layer.0.b", quiet=True)[0]["update_norm"] == pytest.approx(math.sqrt(24))


def test_a_layer_counts_it_and_sums_the_others(explorer: Explorer) -> None:
    (row,) = explorer.diff(10, 20, by="layer", quiet=True)
    assert row["nonfinite_after"] == 32 + 8
    assert row["update_norm"] == pytest.approx(math.sqrt(24))


def test_a_row_of_it_is_unknown_and_on_top(explorer: Explorer) -> None:
    first, second, *_ = explorer.diff(10, 20, tensor="layer.0.b", quiet=True)
    assert first["index"] == 2
    assert {first[name] for name in NUMBERS} == {None}
    assert first["changed_share"] == 1.0
    assert second["update_norm"] == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("metric", ["norm", "relative_update", "max_change", "cosine"])
def test_a_trajectory_has_a_missing_value(explorer: Explorer, metric: str) -> None:
    assert explorer.trajectory("layer.0.a", metric=metric, quiet=True)["value"].to_pylist()[-1] is None


@pytest.mark.parametrize("metric", ["norm", "relative_update"])
def test_a_trajectory_from_statistics_has_a_missing_value(analyzed: Explorer, metric: str) -> None:
    assert analyzed.trajectory("layer.0.a", metric=metric, quiet=True)["value"].to_pylist()[-1] is None


def test_distances_leave_it_out_and_say_so(analyzed: Explorer) -> None:
    table = analyzed.distances()
    assert [(row["a"], row["b"]) for row in table] == [(0, 10)]
    assert "left out: 1 checkpoint where some of them are not finite" in table.note


def test_the_log_counts_values_that_are_not_finite(analyzed: Explorer) -> None:
    assert analyzed.log()["health"].to_pylist() == ["ok", "ok", "32 NaN, 8 Inf in 2 tensors"]
