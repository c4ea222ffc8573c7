"""A real training is captured, and its history is used as a user would use it."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import extended_shell

import capture
import dshistory
from dshistory import current

STEPS = 12


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 11), torch.nn.Dropout(0.1)
    )
    model[0].weight.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(parameters, lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[float]:
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 6))
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@dataclass
class Trained:
    root: Path
    losses: list[float]
    states: dict[int, dict[str, torch.Tensor]]
    final: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root = tmp_path_factory.mktemp("end-to-end") / "history"
    model, optimizer = build()
    losses, states = [], {0: copy.deepcopy(model.state_dict())}
    with capture.enable(model, optimizer=optimizer, every=4, history=root) as session:
        for step, loss in enumerate(train(model, optimizer, STEPS), start=1):
            session.log(loss=loss)
            losses.append(loss)
            states[step] = copy.deepcopy(model.state_dict())
        session.tag("end")
    return Trained(root, losses, states, states[STEPS])


@pytest.fixture
def explorer(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> dshistory.Explorer:
    monkeypatch.setattr(current, "_opened", [])
    return dshistory.open(trained.root)


def test_the_log_has_steps_losses_and_tags(explorer: dshistory.Explorer, trained: Trained) -> None:
    log = explorer.log()
    assert log["step"].to_pylist() == [0, 4, 8, 12]
    assert log["state"].to_pylist() == ["committed"] * 4
    assert log["loss"].to_pylist()[1:] == [trained.losses[step - 1] for step in (4, 8, 12)]
    assert log["lr"].to_pylist()[1:] == [1e-2] * 3
    assert all(seconds > 0 for seconds in log["step_time_s"].to_pylist()[1:])
    assert log[3]["tags"] == "end"
    assert list(explorer.log().losses["value"].to_pylist()) == trained.losses


def test_the_diff_is_that_of_the_training(explorer: dshistory.Explorer, trained: Trained) -> None:
    rows = {row["name"]: row for row in dshistory.diff(4, "end", quiet=True)}
    assert set(rows) == set(trained.final)
    assert rows["0.weight"]["status"] == "same"
    for name in set(rows) - {"0.weight"}:
        a, b = trained.states[4][name].double(), trained.final[name].double()
        assert rows[name]["update_norm"] == pytest.approx(float((b - a).norm()), rel=1e-12)
        assert rows[name]["changed_share"] == float((a != b).double().mean())
    assert set(explorer.diff(0, -1, kinds="exp_avg*", quiet=True)["status"].to_pylist()) == {"added"}


def test_tensors_and_state_dicts_are_those_of_the_step(explorer: dshistory.Explorer, trained: Trained) -> None:
    for name, expected in trained.states[8].items():
        assert torch.equal(dshistory.tensor(name, 8), expected)
    state = dshistory.restore(8, names="2.*", kinds="model")
    assert set(state["model"]) == {"2.weight", "2.bias"}
    assert torch.equal(state["model"]["2.weight"], trained.states[8]["2.weight"])


def test_going_on_from_a_step_gives_the_same_bits(explorer: dshistory.Explorer, trained: Trained) -> None:
    model, optimizer = build()
    torch.manual_seed(99)
    explorer.restore(4, model=model, optimizer=optimizer)
    assert list(train(model, optimizer, STEPS - 4)) == trained.losses[4:]
    for name, expected in trained.final.items():
        assert torch.equal(model.state_dict()[name], expected)


def test_show_verify_reindex_and_sql(explorer: dshistory.Explorer) -> None:
    shown = explorer.show("end")
    assert shown["step"] == STEPS
    assert {"rng", "optimizer"} <= set(shown.tables["objects"]["object"].to_pylist())
    assert {"model", "exp_avg"} <= set(shown.tables["kinds"]["kind"].to_pylist())
    assert len(explorer.verify(quiet=True)) == 0
    before = explorer.sql("SELECT * FROM tensors ORDER BY ALL")
    assert explorer.reindex() == 4
    assert explorer.sql("SELECT * FROM tensors ORDER BY ALL").to_arrow().equals(before.to_arrow())
    (row,) = explorer.sql("SELECT count(*) AS n FROM metrics WHERE name = 'loss' AND step > $step", step=10)
    assert row == {"n": 2}


def test_the_command_line_and_the_magics_show_the_same(
    trained: Trained, explorer: dshistory.Explorer, tmp_path: Path
) -> None:
    words = ["diff", str(trained.root), "4", "8", "--json"]
    output = subprocess.run([sys.executable, "-m", "dshistory", *words], capture_output=True, text=True, timeout=120)
    assert output.returncode == 0, output.stderr
    with extended_shell(tmp_path) as shell:
        table: Any = shell.run_line_magic("dshistory", "diff 4 8 --quiet")
    assert json.loads(output.stdout) == json.loads(table.to_json())


def test_two_runs_are_compared_by_name(trained: Trained, tmp_path: Path) -> None:
    explorer = dshistory.Explorer.open(shutil.copytree(trained.root, tmp_path / "history"))
    first = explorer.history.current_run()
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 5))
    with capture.enable(model, optimizer=torch.optim.SGD(model.parameters()), every=1, history=explorer.root):
        pass
    second = explorer.history.current_run()
    assert second != first
    statuses = {row["name"]: row["status"] for row in explorer.diff(f"{first}:12", f"{second}:0", quiet=True)}
    assert statuses["2.weight"] == statuses["2.bias"] == "reshaped"
    assert statuses["0.weight"] == "changed"
    assert explorer.log(run=first)["step"].to_pylist() == [0, 4, 8, 12]
    assert explorer.log(run=second)["step"].to_pylist() == [0]
