"""Every world size and ZeRO stage reads what every other one wrote."""

import math
from pathlib import Path
from typing import Any

import pytest
from ranks import groups_as_tests

from catalog.history import History
from dshistory.explorer import Explorer

# The set-up of the first test runs several groups, each with its own time limit.
pytestmark = pytest.mark.timeout(1800)

folder, said, test_reshard = groups_as_tests(
    *((module, world) for module in ("deepspeed_cases_reshard", "deepspeed_cases_resharded") for world in (4, 2, 1))
)


def test_statistics_do_not_depend_on_world_size_and_stage(said: dict[tuple[str, int, str], str], folder: Path) -> None:
    assert set(said.values()) == {"passed"}
    first, *others = (statistics_of(path) for path in sorted(folder.glob("same-*")))
    assert len(others) == 11
    assert len(first) > 20
    for other in others:
        shared = first.keys() & other.keys()
        assert {kind for kind, _ in first.keys() ^ other.keys()} <= {"master", "step"}
        assert len(shared) > 20
        for key in shared:
            assert_same_figures(first[key], other[key])


def assert_same_figures(one: dict[str, Any], other: dict[str, Any]) -> None:
    for exact in ("numel", "nan", "inf", "zeros", "min", "max", "exponents"):
        assert one[exact] == other[exact], exact
    scale = abs(one["max"]) + abs(one["min"])
    assert one["sum_of_squares"] == pytest.approx(other["sum_of_squares"], rel=1e-12)
    assert one["sum"] == pytest.approx(other["sum"], abs=1e-12 * scale * one["numel"])
    # Sketches are stored in float32.
    assert one["sketch"] == pytest.approx(other["sketch"], abs=1e-6 * math.sqrt(one["sum_of_squares"]))


def statistics_of(root: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the statistics by kind and name, without buffers, which differ between ranks. They are those of each
    rank's own part, computed by the training or, where it had no time for them, now.
    """
    Explorer.open(root).analyze(quiet=True)
    sql = "SELECT * FROM statistics JOIN sketches USING (run, step, kind, name) WHERE kind <> 'buffer'"
    return {(row["kind"], row["name"]): row for row in History.open(root).query(sql).to_pylist()}
