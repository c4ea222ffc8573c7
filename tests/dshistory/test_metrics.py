"""Trajectory metrics equal numpy over the tensors, single or grouped, and are missing where nothing is known."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from explorer_helpers import Run, whole

from catalog.errors import NotFoundError
from catalog.index import index
from catalog.records import CheckpointRef
from catalog.statistics.compute import analyze_part, missing_parts
from dshistory import Explorer
from dshistory.metrics import METRICS, UPDATE_METRICS
from dshistory.trends import trajectory

LAYERS = {
    "h.0": ("h.0.mlp.weight", "h.0.mlp.bias"),
    "h.1": ("h.1.mlp.weight", "h.1.mlp.bias"),
    "head": ("head.weight",),
}
NAMES = [name for names in LAYERS.values() for name in names]
STEPS = (0, 10, 20, 30)

BRUTE = {
    "norm": lambda x: np.linalg.norm(x[np.isfinite(x)]),
    "nonfinite": lambda x: (~np.isfinite(x)).sum(),
    "nan": lambda x: np.isnan(x).sum(),
    "inf": lambda x: np.isinf(x).sum(),
    "zeros": lambda x: (x == 0).mean(),
    "mean": lambda x: x[np.isfinite(x)].mean(),
    "std": lambda x: x[np.isfinite(x)].std(),
    "rms": lambda x: np.sqrt(np.square(x[np.isfinite(x)]).mean()),
    "min": lambda x: np.nanmin(x),
    "max": lambda x: np.nanmax(x),
}
MOVED = {
    "relative_update": lambda a, b: np.linalg.norm(b - a) / np.linalg.norm(a),
    "update_norm": lambda a, b: np.linalg.norm(b - a),
    "cosine": lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    "max_change": lambda a, b: np.abs(b - a).max(),
    "changed_share": lambda a, b: (a != b).mean(),
    "sign_flips": lambda a, b: (a * b < 0).sum(),
}


@pytest.fixture(scope="module")
def states():
    draw = torch.Generator().manual_seed(1)
    state = {name: torch.randn(2000 if "weight" in name else 100, generator=draw) for name in NAMES}
    for tensor in state.values():
        tensor[:7] = 0.0
    found = []
    for _ in STEPS:
        found.append({name: tensor.clone() for name, tensor in state.items()})
        for name, tensor in state.items():
            state[name] = tensor if name == "h.0.mlp.bias" else tensor + 0.1 * torch.randn(tensor.shape, generator=draw)
            state[name][:7] = 0.0
    found[2]["h.1.mlp.weight"][5] = math.nan
    found[2]["h.1.mlp.weight"][6] = -math.inf
    return found


@pytest.fixture(scope="module")
def root(states, tmp_path_factory):
    root = tmp_path_factory.mktemp("metrics") / "h"
    run = Run(root)
    for step, state in zip(STEPS, states, strict=True):
        run.checkpoint(step, whole(state))
    run.close()
    Explorer.open(root).analyze(quiet=True)
    return root


def trajectory_of(root, metric, **options):
    """Return the values over the steps by name."""
    table = Explorer.open(root).trajectory(metric=metric, quiet=True, **options)
    found = {}
    for row in table:
        found.setdefault(row["name"], []).append(row["value"])
    return found


def vector(state, names):
    return np.concatenate([state[name].double().numpy() for name in names])


def same(found, expected, **within):
    assert [value is None for value in found] == [value is None for value in expected]
    assert [value for value in found if value is not None] == pytest.approx(
        [value for value in expected if value is not None], **within
    )


@pytest.mark.parametrize("metric", BRUTE)
def test_metrics_of_a_step(metric, root, states):
    found = trajectory_of(root, metric)
    assert found.keys() == set(NAMES)
    for name in NAMES:
        same(found[name], [float(BRUTE[metric](vector(state, [name]))) for state in states], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("metric", BRUTE)
def test_a_layer_counts_as_one_long_vector(metric, root, states):
    found = trajectory_of(root, metric, by="layer")
    assert found.keys() == LAYERS.keys()
    for layer, names in LAYERS.items():
        same(found[layer], [float(BRUTE[metric](vector(state, names))) for state in states], rel=1e-9, abs=1e-12)
    (everything,) = trajectory_of(root, metric, by="kind").values()
    same(everything, [float(BRUTE[metric](vector(state, NAMES))) for state in states], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("metric", UPDATE_METRICS)
def test_updates_of_layers(metric, root, states):
    found = trajectory_of(root, metric, by="layer", names=["h.0.*", "head.*"])
    for layer in ("h.0", "head"):
        pairs = [(vector(a, LAYERS[layer]), vector(b, LAYERS[layer])) for a, b in pairwise(states)]
        same(found[layer], [None, *(float(MOVED[metric](*pair)) for pair in pairs)], rel=1e-9)


@pytest.mark.parametrize("metric", ["relative_update", "update_norm", "cosine"])
def test_updates_from_sketches_are_near_and_read_only_what_sketches_miss(metric, root, states, monkeypatch):
    exact = trajectory_of(root, metric, by="layer")
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    read = []
    monkeypatch.setattr(
        trajectory,
        "read_updates",
        lambda history, refs, keys, wanted, parts, advance: read.append((keys, wanted.copy())),
    )
    found = trajectory_of(root, metric, by="layer")
    ((keys, wanted),) = read
    assert [(keys[tensor][1], STEPS[place]) for tensor, place in np.argwhere(wanted)] == [
        ("h.1.mlp.weight", 20),
        ("h.1.mlp.weight", 30),
    ]
    for layer in ("h.0", "head"):
        same(found[layer], exact[layer], rel=0.3)
    assert found["h.1"][2:] == [None, None], "a layer is unknown where a tensor of it is"
    assert trajectory_of(root, metric, names="h.0.mlp.bias")["h.0.mlp.bias"] == [
        None,
        *[None if metric == "cosine" else 0.0] * 3,
    ]


def test_the_fields_name_for_relative_update_is_accepted(root):
    explorer = Explorer.open(root)
    ratio = explorer.trajectory(metric="update_ratio", quiet=True)
    assert ratio.to_pandas().equals(explorer.trajectory(metric="relative_update", quiet=True).to_pandas())
    assert "update_ratio of 5 tensors over 4 checkpoints" in repr(ratio)
    assert ratio.metric == "update_ratio"
    assert "update_ratio" in METRICS


@pytest.mark.parametrize("metric", [metric for metric in BRUTE if metric not in ("norm", "nonfinite")])
@pytest.mark.parametrize("by", ["tensor", "layer"])
def test_without_statistics_the_value_is_missing_and_not_zero(metric, by, states, tmp_path):
    run = Run(tmp_path / "h")
    for step, state in zip(STEPS, states, strict=True):
        run.checkpoint(step, whole(state))
    run.close()
    explorer = Explorer.open(run.root)
    for step in (0, 20):
        (part,) = missing_parts(explorer.history.paths, CheckpointRef("run-a", step))
        analyze_part(explorer.history.paths, "run-a", part)
    index.register(explorer.history.paths, patience_s=10)
    table = explorer.trajectory("h*", metric=metric, by=by, quiet=True)
    assert "unknown at 2 checkpoints without statistics: `analyze` computes them" in repr(table)
    for row in table:
        rests = row["name"] == "h.0.mlp.bias"
        assert (row["value"] is None) == (row["step"] in (10, 30) and not rests), row


@pytest.mark.parametrize("metric", ["norm", "relative_update"])
def test_tensors_without_statistics_are_read(metric, states, tmp_path, monkeypatch):
    run = Run(tmp_path / "h")
    for step, state in zip(STEPS[:2], states, strict=False):
        run.checkpoint(step, whole(state))
    run.close()
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    (value,) = [values[1] for values in trajectory_of(run.root, metric, names="head.weight").values()]
    pair = [vector(state, ["head.weight"]) for state in states[:2]]
    assert value == pytest.approx(BRUTE["norm"](pair[1]) if metric == "norm" else MOVED[metric](*pair), rel=1e-9)


def test_an_update_over_several_checkpoints_is_not_mistaken_for_one(states, tmp_path, monkeypatch):
    """The catalog counts from the last analyzed checkpoint, which is not always the checkpoint before."""
    run = Run(tmp_path / "h")
    for step, state in zip(STEPS, states, strict=True):
        run.checkpoint(step, whole(state))
    run.close()
    explorer = Explorer.open(run.root)
    for step in (0, 20, 30):
        (part,) = missing_parts(explorer.history.paths, CheckpointRef("run-a", step))
        analyze_part(explorer.history.paths, "run-a", part)
    index.register(explorer.history.paths, patience_s=10)
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    found = trajectory_of(run.root, "update_norm", names="head.weight")["head.weight"]
    exact = trajectory_of(run.root, "update_norm", names="head.weight", exact=True)["head.weight"]
    assert found[:3] == exact[:3], "read"
    assert found[3] == pytest.approx(exact[3], rel=0.3)
    assert found[3] != exact[3], "estimated"


def test_a_fork_is_compared_with_its_parent(states, tmp_path, monkeypatch):
    """The catalog counts within a run, yet the first checkpoint of a child is compared with the parent's."""
    parent = Run(tmp_path / "h", "run-a")
    for step, state in zip(STEPS[:3], states, strict=False):
        parent.checkpoint(step, whole(state))
    parent.close()
    child = Run(tmp_path / "h", "run-b", parent=("run-a", 10), created="2026-11-21T10:15:09+00:00")
    child.checkpoint(15, whole(states[3]))
    child.close()
    explorer = Explorer.open(tmp_path / "h")
    explorer.analyze(quiet=True)
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    monkeypatch.setattr(trajectory, "read_updates", None)
    found = trajectory_of(tmp_path / "h", "update_norm", names="head.weight")["head.weight"]
    pairs = [(states[0], states[1]), (states[1], states[3])]
    expected = [MOVED["update_norm"](*(vector(state, ["head.weight"]) for state in pair)) for pair in pairs]
    same(found, [None, *expected], rel=0.3)


def test_a_layer_counts_the_tensors_that_exist(tmp_path):
    run = Run(tmp_path / "h")
    run.checkpoint(0, whole({"h.0.a": torch.full((16,), 3.0)}))
    run.checkpoint(10, whole({"h.0.a": torch.full((16,), 4.0), "h.0.b": torch.full((48,), 8.0)}))
    run.close()
    Explorer.open(run.root).analyze(quiet=True)
    assert trajectory_of(run.root, "mean", by="layer")["h.0"] == [3.0, 7.0]
    assert trajectory_of(run.root, "update_norm", by="layer")["h.0"] == [None, 4.0]


def test_an_unknown_grouping_is_refused(root):
    with pytest.raises(NotFoundError, match="no grouping 'block'; there are tensor, layer, kind"):
        Explorer.open(root).trajectory(by="block")
