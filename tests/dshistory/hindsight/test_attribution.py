"""Attributions and losses between checkpoints are what one computes by hand, exchanging tensors in a state dict."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Run, whole

import capture
from catalog.errors import MismatchError, NotFoundError, SetupError
from dshistory.explorer import Explorer

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(9))
Y = torch.randn(5, 2, generator=torch.Generator().manual_seed(8))


class Net(torch.nn.Module):
    """Three layers, of which the last has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.head = torch.nn.Linear(4, 2)
        self.head.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.head.scale


def loss(model: Any) -> torch.Tensor:
    return (model(X) - Y).square().mean()


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = Net().state_dict()
    found["layers.1.weight"] = torch.full((4, 4), 0.1)
    found["layers.1.bias"] = torch.full((4,), 0.2)
    found["head.scale"] = torch.tensor(float(seed))
    return found


def loss_of(values: dict[str, torch.Tensor]) -> float:
    model = Net()
    model.load_state_dict(values)
    return loss(model).item()


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    run = Run(tmp_path_factory.mktemp("attribution") / "history")
    for seed in (1, 2):
        values = state(seed)
        scale = {"head.scale": values.pop("head.scale")}
        run.checkpoint(seed, [*whole(values), *whole(scale, kind="buffer")])
    run.close()
    return Explorer.open(run.root)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, {"layers.0": ["layers.0.weight", "layers.0.bias"], "layers.1": [], "head": ["head.weight", "head.bias"]}),
        (
            {"by": "tensor", "kinds": "*"},
            {
                **{name: [name] for name in ("layers.0.weight", "layers.0.bias", "head.weight", "head.bias")},
                **{"layers.1.weight": [], "layers.1.bias": [], "head.scale": ["head.scale"]},
            },
        ),
        ({"kinds": ["model", "buffer"]}, {"head": ["head.weight", "head.bias", "head.scale"]}),
    ],
    ids=["layers", "tensors", "layers with buffers"],
)
def test_each_part_is_exchanged_in_both_directions(
    h: Explorer, options: dict[str, Any], parts: dict[str, list[str]]
) -> None:
    model = Net()
    model.head.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = h.attribute(1, 2, loss, model=model, quiet=True, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [one.requires_grad for one in model.parameters()] == [True] * 4 + [False, True]
    first, second = state(1), state(2)
    start, end = loss_of(first), loss_of(second)
    net = Net()
    net.load_state_dict(first)
    loss(net).backward()
    slopes = {name: (one.grad * (second[name] - first[name])).double().sum() for name, one in net.named_parameters()}
    rows = {row["name"]: row for row in found}
    for part, names in parts.items():
        row = rows[part]
        assert row["alone"] == loss_of(first | {name: second[name] for name in names}) - start
        assert row["without"] == end - loss_of(second | {name: first[name] for name in names})
        assert row["share"] == pytest.approx((row["alone"] + row["without"]) / 2 / (end - start))
        if "head.scale" in names:
            assert row["estimate"] is None
        else:
            assert row["estimate"] == pytest.approx(float(sum(slopes[name] for name in names)), rel=1e-5)
    assert found.change == end - start
    assert found.unexplained == pytest.approx(end - start - sum(row["alone"] for row in rows.values()))
    assert f"{found.unexplained:+.4g} of it no single" in repr(found)
    sizes = [abs(row["alone"] + row["without"]) for row in found]
    assert sizes == sorted(sizes, reverse=True)
    assert [trace.name for trace in found.plot().data] == ["alone", "without", "first-order estimate"]


def test_parts_that_do_not_interact_explain_all(h: Explorer) -> None:
    def separable(model: Any) -> torch.Tensor:
        return sum(one.square().sum() for one in model.parameters())

    found = h.attribute(1, 2, separable, model=Net(), quiet=True)
    assert found.unexplained == pytest.approx(0, abs=1e-5)
    for row in found:
        assert row["alone"] == pytest.approx(row["without"], abs=1e-5)
    assert sum(found["share"].to_pylist()) == pytest.approx(1)


def test_a_layer_that_is_not_finite_stands_first(h: Explorer, tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    for step in (1, 2):
        values = state(step)
        if step == 2:
            values["layers.0.bias"][0] = torch.nan
        run.checkpoint(step, [*whole({k: v for k, v in values.items() if k != "head.scale"})])
    run.close()
    model = Net()
    del model.head._buffers["scale"]
    model.head.scale = 1.0
    found = Explorer.open(run.root).attribute(1, 2, loss, model=model, quiet=True)
    assert found[0]["name"] == "layers.0"
    assert math.isnan(found[0]["alone"])
    assert all(math.isfinite(row["alone"]) for row in found[1:])
    assert math.isnan(found.unexplained)
    found.plot()


def test_groups_of_the_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [*model.layers.parameters()], "lr": 0.1}, {"params": [model.head.weight], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    with capture.enable(model, optimizer=optimizer, every=1, history=tmp_path / "history") as session:
        for _ in range(2):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        session.wait()
    found = Explorer.open(tmp_path / "history").attribute(1, 2, loss, model=model, by="group", quiet=True)
    sizes = {row["name"]: row["tensors"] for row in found}
    assert sizes == {"optimizer group 0": 4, "optimizer group 1": 1, "in no group": 1}
    assert found.change < 0
    with pytest.raises(NotFoundError, match="no parts 'block'; there are layer, tensor, group"):
        Explorer.open(tmp_path / "history").attribute(1, 2, loss, model=model, by="block")


def test_a_loss_without_gradient_has_no_estimates(h: Explorer) -> None:
    found = h.attribute(1, 2, lambda model: loss(model).item(), model=Net(), quiet=True)
    assert {row["name"]: row["estimate"] for row in found} == {"layers.0": None, "layers.1": 0.0, "head": None}
    assert found.note.endswith("no single layer explains; no estimates: the loss has no gradient")
    frozen = h.attribute(1, 2, lambda model: 1.0, model=Net(), by="tensor", kinds="buffer", quiet=True)
    assert frozen.note.endswith("no estimates: the loss has no gradient")
    assert frozen["share"].to_pylist() == [None]
    assert [trace.name for trace in frozen.plot().data] == ["alone", "without"]


def test_the_losses_between_two_checkpoints(h: Explorer) -> None:
    places = [0, 0.25, 0.5, 1, 1.5]
    found = h.losses_between(1, 2, loss, model=Net(), t=places, quiet=True)
    first, second = state(1), state(2)

    def between(t: float) -> float:
        return loss_of({k: ((1 - t) * first[k].double() + t * second[k].double()).float() for k in first})

    expected = [loss_of(first), *map(between, places[1:3]), loss_of(second), between(1.5)]
    assert found["value"].to_pylist() == expected
    straight = [(1 - t) * expected[0] + t * expected[3] for t in places[:4]]
    assert found.barrier == max(value - line for value, line in zip(expected, straight, strict=False))
    assert "above the straight line" in repr(found)
    (line,) = found.plot().data
    assert list(line.x) == places
    several = h.losses_between(1, 2, lambda model: {"a": 1.0, "b": loss(model)}, model=Net(), t=[0.5], quiet=True)
    assert several["name"].to_pylist() == ["a", "b"]
    assert several.barrier is None


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda h: h.attribute(1, 3, loss, model=Net()), NotFoundError, "the nearest is 2"),
        (lambda h: h.attribute(1, 2, loss, model=Net(), by="group"), NotFoundError, "run-a:2 has no optimizer, so no"),
        (lambda h: h.attribute(1, 2, loss, model=Net(), kinds="exp_avg"), NotFoundError, "no kind fits 'exp_avg' in a"),
        (lambda h: h.attribute(1, 2, lambda m: "x", model=Net()), SetupError, "at run-a:1: the function returned 'x'"),
        (
            lambda h: h.attribute(1, 2, loss, model=torch.nn.Linear(2, 2)),
            MismatchError,
            "run-a:1 does not fit the model",
        ),
        (lambda h: h.losses_between(1, 2, loss, model=Net(), t=[]), SetupError, r"t=\[\] names no point"),
        (lambda h: h.losses_between(1, 2, loss, model=Net(), t="5"), SetupError, "t='5': give a list of numbers"),
    ],
)
def test_mistakes_are_named(h: Explorer, call: Callable[[Explorer], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(h)
