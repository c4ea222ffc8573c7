"""Trajectories equal the diffs that they consist of, and have no value where a tensor is missing."""

from pathlib import Path

import pytest
import torch
from catalog_helpers import flip_bit
from explorer_helpers import Run, tiny_history, whole

from catalog.errors import NotFoundError
from dshistory import Explorer
from dshistory.metrics import UPDATE_METRICS


def values(explorer: Explorer, metric: str, name: str, **options: str) -> list[float | None]:
    rows = explorer.trajectory(name, metric=metric, quiet=True, **options)
    assert set(rows["name"].to_pylist()) == {name}
    return rows["value"].to_pylist()


def test_every_step_is_the_diff_with_the_one_before(tmp_path: Path) -> None:
    for run in tiny_history(tmp_path / "history"):
        explorer = Explorer.open(run.root)
        diffs = [explorer.diff(a, b, kinds="*") for a, b in ((0, 10), (10, 20))]
        name = "head.weight"
        for metric in UPDATE_METRICS:
            expected = [row[metric] for diff in diffs for row in diff if (row["name"], row["kind"]) == (name, "model")]
            assert values(explorer, metric, name) == [None, *expected]
        norms = [float(explorer.tensor(name, step).double().norm()) for step in (0, 10, 20)]
        assert values(explorer, "norm", name) == pytest.approx(norms, rel=1e-12)
        assert values(explorer, "nonfinite", name) == [0, 0, 0]
        assert explorer.trajectory(kinds="*", quiet=True)["step"].to_pylist() == [0, 10, 20] * 8


def test_unchanged_tensors_are_not_read_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.checkpoint(step, whole({"w": torch.ones(4)}))
    run.close()
    for step in (2, 3):
        flip_bit(tmp_path / f"runs/run-a/steps/{step:012d}/rank-00000.safetensors", offset=4096)
    explorer = Explorer.open(tmp_path)
    assert values(explorer, "norm", "w") == [2.0, 2.0, 2.0]
    assert values(explorer, "relative_update", "w") == [None, 0.0, 0.0]
    assert values(explorer, "cosine", "w") == [None, None, None]


def test_missing_tensors_give_missing_values(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step, tensors in enumerate(
        [{"a": torch.ones(2)}, {"b": torch.ones(2)}, {"a": torch.ones(2)}, {"a": torch.ones(3)}], start=1
    ):
        run.checkpoint(step, whole({"always": torch.zeros(1), **tensors}))
    run.close()
    explorer = Explorer.open(tmp_path)
    assert values(explorer, "update_norm", "a") == [None, None, None, None]
    assert values(explorer, "norm", "a") == pytest.approx([2**0.5, None, 2**0.5, 3**0.5])


def test_a_child_run_goes_back_to_its_parent(tmp_path: Path) -> None:
    parent = Run(tmp_path, "run-a")
    for step in (1, 2, 3):
        parent.checkpoint(step, whole({"w": torch.full((1,), float(step))}))
    parent.close()
    child = Run(tmp_path, "run-b", parent=("run-a", 2), created="2026-11-21T10:15:09+00:00")
    child.checkpoint(4, whole({"w": torch.full((1,), 10.0)}))
    child.close()
    explorer = Explorer.open(tmp_path)
    assert values(explorer, "norm", "w") == [1.0, 2.0, 10.0]
    assert values(explorer, "norm", "w", run="run-a") == [1.0, 2.0, 3.0]
    table = explorer.trajectory("w", metric="norm", quiet=True)
    assert table["run"].to_pylist() == ["run-a", "run-a", "run-b"]
    (line,) = table.plot().data
    assert (list(line.x), list(line.y)) == ([1, 2, 4], [1.0, 2.0, 10.0])


def test_mistakes_name_the_nearest(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.close()
    explorer = Explorer.open(tmp_path)
    with pytest.raises(NotFoundError, match="no metric 'norms'; the metrics are norm, nonfinite"):
        explorer.trajectory(metric="norms")
    with pytest.raises(NotFoundError, match="no committed checkpoint yet"):
        explorer.trajectory()
    with pytest.raises(NotFoundError, match="there are run-a"):
        explorer.trajectory(run="run-b")
