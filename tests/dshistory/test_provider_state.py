"""What a State Provider holds, here averages of the weights, is looked at and exported by the provider's name."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from capture_helpers import bits
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import capture
import dshistory
from catalog.errors import NotFoundError, SetupError
from catalog.verify import verify
from dshistory.commands import cli
from dshistory.commands.completion import line_completions
from dshistory.explorer import Explorer
from dshistory.widgets.timeline_data import read_timeline


@dataclass
class Trained:
    h: Explorer
    model: torch.nn.Module
    averages: dict[int, dict[str, torch.Tensor]]
    shadow: list[torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a history of a training with two averages: one by name, with large tensors, and one as a list."""
    root = tmp_path_factory.mktemp("providers") / "history"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40_000), torch.nn.BatchNorm1d(40_000), torch.nn.Linear(40_000, 8))
    model.add_module("3", torch.nn.Linear(8, 8))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    shadow = {"shadow_params": [parameter.detach().clone() for parameter in model.parameters()]}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    providers = [capture.Stateful("ema", ema), capture.Stateful("lists", shadow)]
    averages = {}
    with capture.enable(model, optimizer=optimizer, every=2, history=root, providers=providers):
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            ema.update_parameters(model)
            averages[step] = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    h = dshistory.open(root)
    h.analyze(quiet=True)
    return Trained(h, model, averages, shadow["shadow_params"])


def test_tensors_and_kinds_are_read_bit_for_bit(trained: Trained) -> None:
    for step in (2, 4):
        state = trained.h.restore(step, kinds=["ema"])["ema"]
        assert state.keys() == trained.averages[step].keys()
        for name, tensor in trained.averages[step].items():
            assert bits(state[name]) == bits(tensor), (step, name)
    assert torch.equal(trained.h.tensor("shadow_params.0", 4, state="lists"), trained.shadow[0])
    with pytest.raises(NotFoundError, match="the nearest is"):
        trained.h.tensor("shadow_params.0", 4, state="list")


def test_a_diff_compares_them_and_stays_about_the_weights_by_default(trained: Trained) -> None:
    rows = {row["name"]: row for row in trained.h.diff(2, 4, kinds="ema")}
    before, after = (trained.averages[step]["module.0.weight"].double() for step in (2, 4))
    assert rows["module.0.weight"]["update_norm"] == pytest.approx(float((after - before).norm()), rel=1e-12)
    assert {row["kind"] for row in trained.h.diff(2, 4)} == {"model"}
    by_kind = trained.h.diff(2, 4, kinds="*", by="kind")
    assert {row["kind"] for row in by_kind} == {"model", "buffer", "ema", "lists"}
    (row,) = trained.h.diff(2, 4, kinds="lists", names="shadow_params.2")
    assert row["status"] == "same"


def test_statistics_and_sketches_are_computed_of_them(trained: Trained) -> None:
    norms = trained.h.trajectory("module.0.weight", kinds="ema", metric="norm")["value"].to_pylist()[1:]
    assert norms == pytest.approx([float(trained.averages[step]["module.0.weight"].double().norm()) for step in (2, 4)])
    moved = trained.h.layers("module.0*", kinds="ema")["value"].to_pylist()
    assert moved[0] is None
    assert all(value > 0 for value in moved[1:])
    counted = [row for row in trained.h.histogram("module.3.bias", state="ema") if row["step"] == 4]
    assert sum(row["elements"] for row in counted) == 8


def test_they_are_in_listings_queries_and_completion(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    history = trained.h.history
    kinds = {"model", "buffer", "ema", "lists"}
    assert set(read_timeline(history, None).kinds) == kinds
    assert set(trained.h.show(4).tables["kinds"]["kind"].to_pylist()) == kinds
    named = trained.h.sql("SELECT name FROM tensors WHERE kind = 'ema' AND step = 4")["name"].to_pylist()
    assert set(named) == trained.averages[4].keys()
    dshistory.open(history.root)
    for line in ("diff 2 4 --kinds e", "export 4 x --weights e", "tensor w 4 --state e"):
        assert "ema" in line_completions(line).texts, line
    assert cli.main(["diff", str(history.root), "2", "4", "--kinds", "ema", "--names", "n_averaged"]) == 0
    assert "n_averaged" in capsys.readouterr().out
    assert verify(history) == []


def test_an_average_is_exported_under_the_names_of_the_model(trained: Trained, tmp_path: Path) -> None:
    trained.h.export(4, tmp_path / "ema.safetensors", weights="ema", quiet=True)
    loaded = copy.deepcopy(trained.model)
    safetensors.torch.load_model(loaded, tmp_path / "ema.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert bits(tensor) == bits(trained.averages[4][f"module.{name}"]), name
    trained.h.export(4, tmp_path / "ema.pt", format="torch", weights="ema", quiet=True)
    assert torch.equal(torch.load(tmp_path / "ema.pt")["0.bias"], trained.averages[4]["module.0.bias"])


def test_what_is_no_average_of_each_weight_is_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no weights of kind 'emma'.*the kinds are buffer, ema, lists, model"):
        trained.h.export(4, tmp_path / "x", weights="emma", quiet=True)
    with pytest.raises(NotFoundError, match=r"for '0.bias' none; its tensors are shadow_params.0.*kinds='lists'"):
        trained.h.export(4, tmp_path / "x", weights="lists", quiet=True)
    with pytest.raises(SetupError, match="weights='ema' means nothing to the format 'deepspeed'"):
        trained.h.export(4, tmp_path / "x", format="deepspeed", weights="ema", quiet=True)


def test_the_average_is_restored_as_before(trained: Trained) -> None:
    model = copy.deepcopy(trained.model)
    ema = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    shadow: dict[str, object] = {}
    providers = [capture.Stateful("ema", ema), capture.Stateful("lists", shadow)]
    capture.restore(2, history=trained.h.root, model=model, optimizer=optimizer, providers=providers)
    for name, tensor in ema.state_dict().items():
        assert bits(tensor) == bits(trained.averages[2][name]), name
    assert bits(shadow["shadow_params"][0]) == bits(trained.shadow[0])
