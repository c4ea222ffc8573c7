"""The tree of runs, and runs side by side."""

import math

import pytest
import torch
from explorer_helpers import Run, whole

import dshistory
from catalog.errors import NotFoundError, SetupError

WEIGHTS = {"layers.0.weight": torch.full((4, 4), 2.0), "layers.1.weight": torch.full((4, 4), 1.0)}


def pieces(first=0.0, second=0.0):
    return whole(
        {
            "layers.0.weight": WEIGHTS["layers.0.weight"] + first,
            "layers.1.weight": WEIGHTS["layers.1.weight"] + second,
        }
    )


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """A training of steps 0, 10, 20, and a replay of it from step 10 that moves its second layer further."""
    root = tmp_path_factory.mktemp("forked") / "history"
    training = Run(root, "training", facts={"number": 1})
    training.checkpoint(0, pieces(), loss=3.0)
    training.checkpoint(10, pieces(0.1, 0.1), loss=2.0)
    training.checkpoint(20, pieces(0.2, 0.2), loss=2.5, lr=0.5)
    training.writers[0].journal.event("closed", None)
    training.close()
    replay = {"id": "x", "of": "training:10", "until": 20, "change": {"lr_scale": 0.5}}
    child = Run(root, "child", parent=("training", 10), facts={"number": 2, "replay": replay})
    child.checkpoint(10, pieces(0.1, 0.1))
    child.checkpoint(20, pieces(0.2, 1.2), loss=1.5, lr=0.25)
    h = dshistory.Explorer.open(root)
    assert h.compare("training", "child", quiet=True)["distance"].to_pylist() == [0.0, 0.0, None]
    h.analyze(quiet=True)
    yield h
    child.close()


def test_runs_are_a_tree(forked):
    table = forked.runs()
    assert table["tree"].to_pylist() == ["*", "└─o"]
    assert table["run"].to_pylist() == ["training", "child"]
    assert table[0]["kind"] == "training"
    child = table[1]
    assert (child["parent"], child["kind"], child["changed"]) == ("training:10", "replay", "lr_scale 0.5")
    assert (child["first"], child["last"], child["checkpoints"]) == (10, 20, 2)
    assert (child["loss"], child["state"]) == (1.5, "being written")
    assert (table[0]["loss"], table[0]["lowest_loss"], table[0]["state"]) == (2.5, 2.0, "ended")


def test_the_tree_draws_itself(forked):
    figure = forked.runs().plot()
    assert list(figure.data[0].x) == [0, 20]
    assert list(figure.data[1].x) == [10, 10, 10, 20]
    assert list(figure.data[1].y) == [0, -1, -1, -1]
    assert "lr_scale 0.5" in figure.data[1].hovertemplate


def test_runs_that_are_each_others_ancestors_are_listed(tmp_path):
    Run(tmp_path / "h", "a", parent=("b", 1)).close()
    Run(tmp_path / "h", "b", parent=("a", 1)).close()
    assert sorted(dshistory.Explorer.open(tmp_path / "h").runs()["run"].to_pylist()) == ["a", "b"]


def test_compared_runs_are_aligned_by_step(forked):
    table = forked.compare("training", "child", quiet=True)
    assert table["step"].to_pylist() == [0, 10, 20]
    assert table["loss_difference"].to_pylist() == [0.0, 0.0, -1.0]
    norm = math.hypot(4 * 2.2, 4 * 1.2)
    assert table["distance"].to_pylist() == pytest.approx([0.0, 0.0, 4 * 1.0 / norm], rel=1e-6)
    assert table["furthest_layer"].to_pylist() == [None, None, "layers.1"]
    assert table.parted() == {"child": 20}
    assert table.note == "child parts from training at step 20"
    moved = {row["layer"]: row["distance"] for row in table.layers if row["step"] == 20}
    assert moved == pytest.approx({"layers.0": 0.0, "layers.1": 1.0 / 1.2}, rel=1e-6)


def test_compared_runs_draw_themselves(forked):
    table = forked.compare("training", "child", quiet=True)
    assert [list(trace.y) for trace in table.plot().data] == [[3.0, 2.0, 2.5], [3.0, 2.0, 1.5]]
    assert [list(trace.x) for trace in table.plot("distance").data] == [[0, 10, 20]]
    assert table.figures() == ["loss", "lr", "distance", "layers"]
    assert [list(trace.y) for trace in table.plot("lr").data] == [[0.5], [0.25]]
    layers = table.plot("layers").data[0]
    assert list(layers.y) == ["layers.1", "layers.0"], "that which parts comes first"
    assert [list(line) for line in layers.customdata] == [pytest.approx([0, 1 / 1.2]), [0, 0]]
    with pytest.raises(NotFoundError, match="no figure 'distence'; the nearest is distance"):
        table.plot("distence")


def test_each_layer_parts_at_its_step(forked):
    rows = list(forked.compare("training", "child", quiet=True).parted_layers())
    assert [(row["layer"], row["step"]) for row in rows] == [("layers.1", 20), ("layers.0", None)]
    assert [row["distance"] for row in rows] == pytest.approx([1 / 1.2, 0.0])


@pytest.mark.parametrize("runs", [[], ["training"], ["training", "training"]])
def test_one_run_is_not_compared(forked, runs):
    with pytest.raises(SetupError, match="give two or more runs, each once"):
        forked.compare(*runs)


def test_a_run_that_is_not_there_is_named(forked):
    with pytest.raises(NotFoundError, match="no run 'other'"):
        forked.compare("training", "other")
