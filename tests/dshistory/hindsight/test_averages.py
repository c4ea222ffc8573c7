"""Averages, points between checkpoints and task vectors are what NumPy computes in float64, rounded once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explorer_helpers import Piece, Run, shares, whole
from safetensors.torch import load_file

from catalog.errors import MismatchError, NotFoundError, SetupError
from dshistory.explorer import Explorer

STEPS = (10, 20, 30, 40)


class Tiny(torch.nn.Module):
    """A model with tied weights, and with persistent, whole and non-persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 5, bias=False)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x)) + self.head(x)


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "embed.weight": torch.randn(5, 3, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "norm.bias": torch.randn(5, generator=generator, dtype=torch.float64),
        "frozen": torch.full((3,), 0.1),
    }


def buffers_at(step: int) -> dict[str, torch.Tensor]:
    return {
        "norm.running_mean": torch.full((5,), float(step)),
        "norm.running_var": torch.full((5,), 1.0 + step),
        "norm.num_batches_tracked": torch.tensor(step),
        "mask": torch.tensor([0.0, -torch.inf]),
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "cut as by ZeRO"])
def h(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    world_size = request.param
    run = Run(tmp_path_factory.mktemp("averages") / "history", world_size=world_size)
    for step in STEPS:
        ranks = [
            [*pieces, *whole(buffers_at(step), kind="buffer")] if rank == 0 else pieces
            for rank, pieces in enumerate(shares(tensors_at(step), world_size))
        ]
        run.checkpoint(step, *ranks)
    run.close()
    return Explorer.open(run.root)


def expected(name: str, weights: dict[int, float]) -> torch.Tensor:
    """Return the sum by hand, in NumPy's float64 in the order of the steps."""
    dtype = tensors_at(10)[name].dtype
    total = np.zeros(tensors_at(10)[name].shape)
    for step, weight in weights.items():
        total = total + weight * tensors_at(step)[name].double().numpy()
    return torch.from_numpy(total).to(dtype)


def assert_is(found: dict[str, torch.Tensor], weights: dict[int, float]) -> None:
    for name in ("embed.weight", "norm.weight", "norm.bias"):
        assert found[name].dtype == tensors_at(10)[name].dtype
        assert torch.equal(found[name], expected(name, weights)), name


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, dict.fromkeys(STEPS, 0.25)),
        ({"weights": [1, 2, 3, 4]}, {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}),
        ({"weights": [0, 0, 0, 5]}, {10: 0.0, 20: 0.0, 30: 0.0, 40: 1.0}),
        (
            {"ema": 0.5},
            {step: 0.5**behind / (0.125 + 0.25 + 0.5 + 1) for step, behind in zip(STEPS, (3, 2, 1, 0), strict=True)},
        ),
    ],
    ids=["equal", "weighted", "one alone", "ema"],
)
def test_an_average_is_the_sum_in_float64_rounded_once(
    h: Explorer, options: dict[str, Any], weights: dict[int, float]
) -> None:
    found = h.average(list(STEPS), quiet=True, **options)
    assert_is(found["model"], weights)
    assert torch.equal(found["model"]["frozen"], torch.full((3,), 0.1))
    assert (
        found["buffer"]["norm.running_mean"].tolist()
        == [pytest.approx(sum(step * weight for step, weight in weights.items()))] * 5
    )
    assert torch.equal(found["buffer"]["mask"], torch.tensor([0.0, -torch.inf]))
    assert found["buffer"]["norm.num_batches_tracked"] == 40
    assert found.taken_from_last == ("norm.num_batches_tracked",)


def test_a_moving_average_is_the_recursion_with_its_bias_corrected(h: Explorer) -> None:
    moving = np.zeros(5)
    for step in STEPS:
        moving = 0.9 * moving + 0.1 * tensors_at(step)["norm.bias"].numpy()
    found = h.average(STEPS, ema=0.9, quiet=True)["model"]["norm.bias"]
    np.testing.assert_allclose(found.numpy(), moving / (1 - 0.9**4), rtol=1e-14)


def test_the_last_checkpoints_of_the_run(h: Explorer) -> None:
    assert_is(h.average("last 2", quiet=True)["model"], {30: 0.5, 40: 0.5})
    assert_is(h.average("latest", quiet=True)["model"], {40: 1.0})
    assert_is(h.average(range(10, 30, 10), run="run-a", quiet=True)["model"], {10: 0.5, 20: 0.5})


def test_the_line_between_two_checkpoints(h: Explorer) -> None:
    for t in (0.0, 0.25, 1.0, -1.0, 2.0):
        found = h.interpolate(10, 40, t, quiet=True)
        assert_is(found["model"], {10: 1 - t, 40: t})
        assert torch.equal(found["model"]["frozen"], torch.full((3,), 0.1))
    assert repr(found).startswith("2 of the way from run-a:10 to run-a:40")


def test_a_task_vector_is_the_difference(h: Explorer) -> None:
    found = h.delta(10, 40, quiet=True)
    assert_is(found["model"], {10: -1.0, 40: 1.0})
    assert not found["model"]["frozen"].any()
    assert not found["buffer"]["mask"].any()
    assert "norm.num_batches_tracked" not in found["buffer"]


def test_names_and_kinds_choose(h: Explorer) -> None:
    assert {kind: set(found) for kind, found in h.average(STEPS, names="norm", quiet=True).items()} == {
        "model": {"norm.weight", "norm.bias"},
        "buffer": {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"},
    }
    with pytest.raises(NotFoundError, match=r"no kind fits 'ema' in run-a:10 to run-a:40 \(4 checkpoints\); there are"):
        h.average(STEPS, kinds="ema")


def test_an_average_of_training_goes_into_the_model_and_other_formats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, run = Tiny(), Run(tmp_path / "history")
    states = []
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(4, 3))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        states.append(state)
        tied = Piece("embed.weight", state["embed.weight"], aliases=("head.weight",))
        weights = {name: state[name] for name in ("norm.weight", "norm.bias")}
        buffers = {
            name: tensor for name, tensor in state.items() if name not in {*weights, "embed.weight", "head.weight"}
        }
        run.checkpoint(step, [tied, *whole(weights), *whole(buffers, kind="buffer")])
    run.close()
    h = Explorer.open(run.root)
    found = h.average("last 2", quiet=True)
    other = Tiny()
    other.load_state_dict(found.state_dict())
    for name, value in other.state_dict().items():
        mean = (states[0][name].double() + states[1][name].double()) / 2
        assert torch.equal(value, states[1][name] if "tracked" in name else mean.to(value.dtype)), name
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    x = torch.randn(4, 3)
    other.eval()
    assert found.evaluate(lambda m: m(x).sum(), model=model) == other(x).sum().item()
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    found.export(tmp_path / "soup.safetensors")
    loaded = load_file(tmp_path / "soup.safetensors")
    assert loaded.keys() == found.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in loaded.items())
    found.export(tmp_path / "soup.pt", format="torch")
    state = torch.load(tmp_path / "soup.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    other.load_state_dict(state)
    config = tmp_path / "config.json"
    config.write_text("{}")
    found.export(tmp_path / "folder", format="huggingface", config=config)
    assert load_file(tmp_path / "folder" / "model.safetensors").keys() == loaded.keys()
    found.export(tmp_path / "dcp", format="dcp")
    with pytest.raises(
        SetupError, match="'universal' holds an optimizer too, which average of run-a:1, run-a:2 does not"
    ):
        found.export(tmp_path / "u", format="universal")
    with pytest.raises(SetupError, match="it exists; name another place, or pass overwrite=True"):
        found.export(tmp_path / "soup.pt", format="torch")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda h: h.average([10, 25]), NotFoundError, "step 25 was not captured .* the nearest are 20 and 30"),
        (lambda h: h.average([10, 25], run="run-a"), NotFoundError, "in run run-a or its parents .* nearest are 20"),
        (lambda h: h.average("last 9"), NotFoundError, "steps='last 9': run-a:10 to run-a:40 are 4 checkpoints"),
        (lambda h: h.average([]), SetupError, "names no checkpoint: give a list of steps, or 'last 10'"),
        (lambda h: h.average([10, "run-a:10"]), SetupError, "checkpoint run-a:10 is named twice"),
        (lambda h: h.average([10, 20], weights=[1]), SetupError, "1 weights for 2 checkpoints: give one for each"),
        (lambda h: h.average([10, 20], weights=[1, -1]), SetupError, "finite numbers whose sum, 0, is not 0"),
        (lambda h: h.average([10, 20], weights=[1, np.nan]), SetupError, "give finite numbers"),
        (lambda h: h.average([10, 20], weights="12"), SetupError, "average: weights='12': give a list of numbers"),
        (lambda h: h.average([10, 20], ema=1.0), SetupError, "ema=1.0: give a number between 0 and 1"),
        (lambda h: h.average([10, 20], ema=0.9, weights=[1, 1]), SetupError, "pass weights= or ema=, not both"),
        (lambda h: h.interpolate(10, 20, np.inf), SetupError, "t=inf: give a finite number: 0 is run-a:10"),
        (lambda h: h.delta(11, 20), NotFoundError, "the nearest are 10 and 20"),
    ],
)
def test_mistakes_are_named(h: Explorer, call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(h)


def odd(root: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Explorer:
    run = Run(root / "history")
    run.checkpoint(1, whole(first))
    run.checkpoint(2, whole(second))
    run.close()
    return Explorer.open(run.root)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    h = odd(tmp_path / "a", {"w": torch.ones(2), "v": torch.ones(2)}, {"w": torch.ones(3), "v": torch.zeros(2)})
    with pytest.raises(MismatchError, match=r"'w' has shape \(2,\) in checkpoint run-a:1 and \(3,\) in run-a:2"):
        h.average([1, 2])
    assert h.average([1, 2], names="v")["model"]["v"].tolist() == [0.5, 0.5]
    h = odd(tmp_path / "b", {"w": torch.ones(2)}, {"w": torch.ones(2), "v": torch.ones(1)})
    with pytest.raises(MismatchError, match="model 'v' is in checkpoint run-a:2 and not in run-a:1"):
        h.interpolate(1, 2)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    h = odd(tmp_path / "a", {"w": torch.tensor([1.0, torch.nan])}, {"w": torch.ones(2)})
    with pytest.raises(SetupError, match=r"1 of 2 elements of model 'w' \(in checkpoint run-a:1 they are not either"):
        h.average([1, 2])
    half = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    h = odd(tmp_path / "b", {"w": -half}, {"w": half})
    with pytest.raises(SetupError, match=r"delta: .* 1 of 2 elements of model 'w' \(too large for F16\)"):
        h.delta(1, 2)


def test_a_tensor_in_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dshistory.hindsight.combination._CHUNK_NUMEL", 7)
    monkeypatch.setattr("dshistory.tensors.stream.PIECE_BYTES", 64)
    values = [torch.randn(100, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    found = odd(tmp_path, {"w": values[0]}, {"w": values[1]}).average([1, 2], quiet=True)["model"]["w"]
    assert torch.equal(found, (values[0].double() * 0.5 + values[1].double() * 0.5).float())
