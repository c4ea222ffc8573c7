"""The metrics of a lineage are those of each run up to its fork, whatever checkpoints it has."""

import math

import pytest
from catalog_helpers import Run

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.lineage_metrics import lineage_metrics


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The run a has steps 1 to 6; b goes on from a:4 with steps 4 (computed later) to 6; c from b:2, before b began."""
    root = tmp_path_factory.mktemp("forked") / "history"
    parents = {"a": (None, range(1, 7)), "b": (("a", 4), range(4, 7)), "c": (("b", 2), range(3, 5))}
    for day, (run, (parent, steps)) in enumerate(parents.items(), start=1):
        created = f"2026-11-{day:02d}T00:00:00+00:00"
        with Run(root, run=run, parent=parent, created=created) as writer:
            for step in steps:
                writer.writers[0].journal.metric(step, "loss", 10.0 * day + step)
            writer.writers[0].journal.metric(3, "lr", math.nan)
    return History.open(root)


def test_each_run_counts_up_to_its_fork_and_a_descendant_before_its_parent(forked: History) -> None:
    losses = {run: lineage_metrics(forked.paths, run, ["loss"])["loss"] for run in "abc"}
    assert losses["a"] == {step: 10.0 + step for step in range(1, 7)}
    assert list(losses["b"].items()) == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0), (5, 25.0), (6, 26.0)]
    assert losses["c"] == {1: 11.0, 2: 12.0, 3: 33.0, 4: 34.0}


def test_all_names_are_given_and_values_that_are_no_number_stay(forked: History) -> None:
    found = lineage_metrics(forked.paths, "a")
    assert sorted(found) == ["loss", "lr"]
    assert math.isnan(found["lr"][3])
    assert lineage_metrics(forked.paths, "a", ["accuracy"]) == {}


def test_a_run_that_is_not_there_is_named(forked: History) -> None:
    with pytest.raises(NotFoundError, match="no run 'zz'"):
        lineage_metrics(forked.paths, "zz")
