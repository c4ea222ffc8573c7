"""One query makes the log, a row per checkpoint with metrics, bytes, state and health."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Run, whole

from catalog.errors import NotFoundError
from catalog.history import History
from dshistory.explorer import Explorer

COLUMNS = ("step", "run", "created", "loss", "lr", "grad_norm", "step_time_s")
END = ("bytes", "new_bytes", "state", "health", "tags")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "history")


def test_columns_and_the_trainings_own_metrics(run: Run) -> None:
    run.checkpoint(0, whole({"w": torch.ones(4)}), loss=3.0, lr=0.1, accuracy=0.5)
    run.checkpoint(1, whole({"w": torch.ones(4)}), loss=2.0, perplexity=math.nan, applied=1.0, stall_s=0.1)
    table = Explorer.open(run.root).log()
    assert table.columns == (*COLUMNS, "accuracy", "perplexity", *END)
    assert table["accuracy"].to_pylist() == [0.5, None]
    first, second = table["perplexity"].to_pylist()
    assert first is None
    assert math.isnan(second)
    assert table["loss"].to_pylist() == [3.0, 2.0]
    assert table["lr"].to_pylist() == [0.1, None]


def test_metrics_without_a_column_are_named(run: Run) -> None:
    own = {f"metric_{i}": float(i) for i in range(9)}
    run.checkpoint(0, whole({"w": torch.ones(4)}), bytes=1.0, **own)
    table = Explorer.open(run.root).log()
    assert table.columns == (*COLUMNS, *(f"metric_{i}" for i in range(8)), *END)
    assert table["bytes"].to_pylist() == [16]
    assert "further metrics are in the SQL table metrics: metric_8, bytes" in table.note


def test_chosen_metrics_have_a_column(run: Run) -> None:
    trainers = {"epoch": 1.0, "trainer_loss": 2.0, "eval_loss": 3.0, "eval_runtime": 4.0, "train_runtime": 5.0}
    run.checkpoint(0, whole({"w": torch.ones(4)}), **trainers, **{f"eval_metric_{i}": float(i) for i in range(9)})
    explorer = Explorer.open(run.root)
    assert "trainer_loss" not in explorer.log().columns
    table = explorer.log(metrics=["eval_l*", "trainer_loss"])
    assert table.columns == (*COLUMNS, "eval_loss", "trainer_loss", *END)
    assert (table[0]["eval_loss"], table[0]["trainer_loss"]) == (3.0, 2.0)
    assert "further metrics" not in table.note
    assert len(explorer.log(metrics="eval_*").columns) == len(COLUMNS) + 11 + len(END)
    with pytest.raises(NotFoundError, match=r"no metric fits 'eval_los' .*; the nearest .*eval_loss"):
        explorer.log(metrics="eval_los")


def test_health_counts_values_that_are_not_finite(run: Run) -> None:
    nan, inf = math.nan, math.inf
    tensors = {
        0: [*whole({"a": torch.ones(4)}), *whole({"mask": torch.tensor([-inf, 0.0])}, kind="buffer")],
        1: [*whole({"a": torch.tensor([nan, 1.0])}), *whole({"mask": torch.tensor([-inf, nan])}, kind="buffer")],
        2: [*whole({"a": torch.tensor([inf, -inf])}), *whole({"a": torch.tensor([1.0, inf])}, kind="exp_avg")],
        3: whole({"a": torch.tensor([nan, 1.0])}),
        4: whole({"a": torch.ones(4)}),
    }
    for step, pieces in tensors.items():
        run.checkpoint(step, pieces)
    run.writers[0].begin(5)
    explorer = Explorer.open(run.root)
    for step in range(4):
        explorer.analyze(step, quiet=True)
    table = explorer.log()
    assert table["health"].to_pylist() == [
        "ok",
        "2 NaN in 2 tensors",
        "3 Inf in 2 tensors",
        "1 NaN in 1 tensor",
        None,
        None,
    ]
    assert table["state"].to_pylist() == ["committed"] * 5 + ["pending"]
    assert table.note == "6 checkpoints; health is unknown (?) for 1 without statistics: `analyze` computes them"


def test_one_query_makes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        run.checkpoint(step, whole({"w": torch.ones(4)}), loss=1.0, own=2.0)
    asked: list[str] = []
    ask = History.query

    def counted(self: History, sql: str, *params: Any) -> Any:
        asked.append(sql)
        return ask(self, sql, *params)

    monkeypatch.setattr(History, "query", counted)
    table = Explorer.open(run.root).log()
    assert len(table) == 3
    assert len(asked) == 1
    assert table.losses["value"].to_pylist() == [1.0] * 3


def test_every_verb_takes_the_beginning_of_a_runs_name(run: Run) -> None:
    run.checkpoint(1, whole({"w": torch.ones(2)}), loss=1.0)
    explorer = Explorer.open(run.root)
    explorer.analyze(quiet=True)
    assert explorer.log(run="run").columns == explorer.log(run="run-a").columns
    assert set(explorer.trajectory(metric="norm", run="run", quiet=True)["run"].to_pylist()) <= {"run-a"}
    assert set(explorer.layers(run="ru")["run"].to_pylist()) == {"run-a"}
