"""Distances between all checkpoints, and the path that they make in the plane, are right."""

import warnings

import numpy as np
import pytest
import torch
from capture_helpers import make, one_step, reference
from explorer_helpers import Run, whole

import capture
import dshistory
from catalog.errors import NotFoundError
from dshistory.explorer import Explorer
from dshistory.trends.distances import plane


@pytest.fixture
def trained(history):
    """Return an analysed run of seven checkpoints, and the weights of each as one vector."""
    model, optimizer = make(256)
    states = []
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0) as session:
        session.wait()
        states.append(reference(model, optimizer)["model"])
        for _ in range(6):
            one_step(model, optimizer)
            session.wait()
            states.append(reference(model, optimizer)["model"])
    explorer = dshistory.open(history)
    explorer.analyze(quiet=True)
    return explorer, states


def test_distances_equal_those_of_the_weights(trained):
    explorer, states = trained
    vectors = [torch.cat([t.double().flatten() for _, t in sorted(state.items())]) for state in states]
    table = explorer.distances()
    rows = {(row["a"], row["b"]): row["distance"] for row in table}
    assert sorted(rows) == [(a, b) for a in range(7) for b in range(a + 1, 7)]
    for (a, b), distance in rows.items():
        assert distance == pytest.approx(float((vectors[a] - vectors[b]).norm()), rel=0.2)
    assert "estimated" in repr(table)
    (heat,) = table.plot().data
    assert np.array(heat.z).shape == (7, 7)


def test_the_path_in_the_plane(trained):
    path = trained[0].distances("*.weight").path()
    assert path.columns == ("run", "step", "x", "y")
    assert path["step"].to_pylist() == list(range(7))
    assert "random walk" in path.note


def test_a_path_within_a_plane_is_kept():
    points = np.random.default_rng(3).normal(size=(9, 2))
    squares = np.square(points[:, None] - points[None]).sum(-1)
    found, share = plane(squares)
    assert share == pytest.approx(1.0)
    assert np.square(found[:, None] - found[None]).sum(-1) == pytest.approx(squares)


def test_a_random_walk_has_most_of_its_variance_in_the_plane():
    """In a long walk the first two directions hold about 61 % and 15 % (Antognini and Sohl-Dickstein, 2018)."""
    at = np.arange(400.0)
    _, share = plane(np.abs(at[:, None] - at[None]))
    assert share == pytest.approx(0.76, abs=0.02)


def test_one_checkpoint_is_a_point():
    points, share = plane(np.zeros((1, 1)))
    assert points.tolist() == [[0.0, 0.0]]
    assert share == 1.0


def test_without_statistics_it_says_what_to_do(history):
    model, optimizer = make(64)
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0):
        one_step(model, optimizer)
    with pytest.raises(NotFoundError, match="`analyze` computes them"):
        dshistory.open(history).distances()


def test_a_path_without_a_usable_checkpoint_is_empty(tmp_path):
    run = Run(tmp_path)
    for step in (1, 2):
        run.checkpoint(step, whole({"h.0.w": torch.full((64,), float("nan"))}))
    run.close()
    explorer = Explorer.open(tmp_path)
    explorer.analyze(quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(explorer.distances().path()) == 0
