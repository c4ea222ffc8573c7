"""A diff by layer or kind equals a diff of the concatenated tensors."""

import pytest
import torch
from capture_helpers import make, one_step, reference
from explorer_helpers import history_of, whole

import capture
import dshistory
from catalog.errors import NotFoundError
from dshistory.comparison.grouping import layer_of


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("h.3.mlp.weight", "h.3"),
        ("model.layers.12.attn.q.weight", "model.layers.12"),
        ("blocks.0.experts.7.up.weight", "blocks.0"),
        ("blocks.10.mlp.0.weight", "blocks.10"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("0.mlp.1.weight", "0"),
        ("head.weight", "head"),
        ("scale", "scale"),
        ("3.weight", "3"),
        ("layers.12", "layers"),
    ],
)
def test_the_layer_of_a_name(name, layer):
    assert layer_of(name) == layer


@pytest.fixture
def trained(history):
    """Return the explorer and the references of steps 1 and 4; `inner.bias` never changes."""
    model, _ = make(64)
    model.inner.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    states = {}
    with capture.enable(model, optimizer=optimizer, history=history, every=1, stats_every=0) as session:
        for _ in range(4):
            one_step(model, optimizer)
            states[session.snapshot()] = reference(model, optimizer)["model"]
    explorer = dshistory.open(history)
    explorer.analyze(quiet=True)
    return explorer, states[1], states[4]


@pytest.mark.parametrize("by", ["layer", "kind"])
def test_the_share_that_changed_is_known_of_what_is_nowhere_finite(tmp_path, by):
    before = {"h.w": torch.ones(30), "h.b": torch.ones(10), "h.new": torch.ones(2)}
    spoilt = {"h.w": torch.full((30,), torch.nan), "h.b": torch.ones(10), "h.new": torch.ones(3)}
    worse = {"h.w": torch.full((30,), torch.inf), "h.b": torch.full((10,), torch.nan), "h.new": torch.ones(3)}
    explorer = history_of(tmp_path, [whole(before)], [whole(spoilt)], [whole(worse)], world_sizes=(1, 1, 1))
    for ends, share in (((10, 20), 0.75), ((10, 30), 1.0)):
        (row,) = explorer.diff(*ends, by=by)
        tensors = explorer.diff(*ends, names=["h.w", "h.b"])
        assert [each["changed_share"] for each in tensors if each["name"] == "h.w"] == [1.0]
        assert row["changed_share"] == share


def flat(state, prefix=""):
    return torch.cat([tensor.double().reshape(-1) for name, tensor in sorted(state.items()) if name.startswith(prefix)])


def test_by_layer(trained):
    explorer, before, after = trained
    rows = {row["name"]: row for row in explorer.diff(1, 4, by="layer", quiet=True)}
    assert rows.keys() == {"inner", "norm", "outer"}
    for layer, row in rows.items():
        a, b = flat(before, f"{layer}."), flat(after, f"{layer}.")
        assert row["shape"] == [a.numel()]
        assert row["update_norm"] == pytest.approx(float((b - a).norm()), rel=1e-9)
        assert row["relative_update"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-9)
        assert row["cosine"] == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-9)
        assert row["max_change"] == pytest.approx(float((b - a).abs().max()), rel=1e-9)
        assert row["changed_share"] == pytest.approx(float((a != b).double().mean()), rel=1e-9)
        assert row["bound"] == 0.0


def test_by_kind(trained):
    explorer, before, after = trained
    rows = {row["kind"]: row for row in explorer.diff(1, 4, kinds=["model", "exp_avg"], by="kind", quiet=True)}
    assert rows.keys() == {"model", "exp_avg"}
    assert rows["model"]["update_norm"] == pytest.approx(float((flat(after) - flat(before)).norm()), rel=1e-9)


def test_an_unknown_grouping_is_refused(trained):
    explorer, *_ = trained
    with pytest.raises(NotFoundError, match="no grouping 'head'; there are tensor, layer, kind"):
        explorer.diff(1, 4, by="head", quiet=True)
