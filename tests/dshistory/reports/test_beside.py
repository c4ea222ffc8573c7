"""Reports on many checkpoints go on when some of these are removed meanwhile, as a policy does beside a training."""

import importlib
from pathlib import Path

import pytest
import torch
from catalog_helpers import meanwhile
from explorer_helpers import Run, whole

import dshistory.trends.read_missing
from catalog.records import CheckpointRef
from catalog.retention.prune import remove
from dshistory import Explorer

STEPS = range(1, 5)


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    """Return a history of four checkpoints of a tensor that grows by 1 with each."""
    run = Run(tmp_path / "h")
    for step in STEPS:
        run.checkpoint(step, whole({"w": torch.full((3,), float(step))}))
    run.close()
    return Explorer.open(tmp_path / "h")


def removes(explorer: Explorer, *steps: int) -> None:
    refs = [CheckpointRef("run-a", step) for step in steps]
    assert remove(explorer.history, refs, force=True, dry_run=False).removed


def test_analyze_passes_over_what_is_removed(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    analyze = importlib.import_module("dshistory.reports.analyze")
    happened = meanwhile(monkeypatch, analyze, "ByteProgress", lambda: removes(explorer, 2, 3))
    found = explorer.analyze(quiet=True)
    assert happened
    assert found["step"].to_pylist() == [1, 4]
    assert found.note == "statistics of 2 checkpoints computed"
    assert sorted(row["step"] for row in explorer.sql("SELECT DISTINCT step FROM statistics")) == [1, 4]


def test_analyze_passes_over_what_is_removed_before_it_is_looked_at(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyze = importlib.import_module("dshistory.reports.analyze")
    happened = meanwhile(monkeypatch, analyze, "missing_parts", lambda: removes(explorer, 3))
    assert explorer.analyze(quiet=True)["step"].to_pylist() == [1, 2, 4]
    assert happened


@pytest.mark.parametrize(
    ("metric", "expected"), [("max_change", [None, None, None, 1.0]), ("nonfinite", [0.0, None, 0.0, 0.0])]
)
@pytest.mark.parametrize("name", ["stored_tensors", "pin"])
def test_a_trajectory_has_no_value_where_a_checkpoint_is_removed(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, metric: str, expected: list[float | None], name: str
) -> None:
    happened = meanwhile(monkeypatch, dshistory.trends.read_missing, name, lambda: removes(explorer, 2))
    assert explorer.trajectory("w", metric=metric, quiet=True)["value"].to_pylist() == expected
    assert happened
