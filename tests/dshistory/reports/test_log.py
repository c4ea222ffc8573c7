"""One query makes the log, a row per checkpoint with metrics, bytes, state and health."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from catalog_helpers import Run as CatalogRun
from explorer_helpers import Run, whole
from retention_helpers import commit, model_extents

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.index import index
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef
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


def test_one_look_at_the_catalog_makes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        run.checkpoint(step, whole({"w": torch.ones(4)}), loss=1.0, own=2.0)
    asked: list[str] = []
    asking = index.asking

    def counted(paths: HistoryPaths) -> Any:
        asked.append(str(paths.root))
        return asking(paths)

    monkeypatch.setattr(index, "asking", counted)
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


@pytest.mark.guards("Damage is found and named")
def test_a_checkpoint_whose_bytes_are_gone_is_never_healthy(tmp_path: Path) -> None:
    with CatalogRun(tmp_path / "h") as run:
        history = History.open(tmp_path / "h")
        for step in range(0, 60, 10):
            frozen = model_extents(history, CheckpointRef("run-a", 10)) if step in (30, 50) else {}
            own = {"w": b"1"} if frozen else {"w": b"1", "frozen": b"never changes"}
            commit(run, step, own, refer={"frozen": frozen["frozen"]} if frozen else None)
    explorer = Explorer.open(tmp_path / "h")
    explorer.analyze(quiet=True)
    assert explorer.log()["health"].to_pylist() == ["ok"] * 6
    data = history.paths.data("run-a", 10, 0)
    content = data.read_bytes()
    needs = f"damaged: needs {history.paths.relative(data)} (step 10), which "
    for damage, told in (
        (data.unlink, "is gone"),
        (lambda: data.write_bytes(content[:-4096]), "has 4096 of 8192 bytes"),
    ):
        damage()
        found = dict(zip(explorer.log()["step"].to_pylist(), explorer.log()["health"].to_pylist(), strict=True))
        reach = content.index(b"never changes") >= len(content) - 4096
        assert found[0] == found[20] == found[40] == "ok"
        assert found[10] == needs + told
        assert all(found[step].startswith("damaged: needs") and "step 10" in found[step] for step in (30, 50) if reach)
    assert "damaged: bytes that they need are gone" in explorer.log().note
    shutil.rmtree(data.parent)
    history.paths.manifest("run-a", 40, 0).unlink()
    found = dict(zip(explorer.log()["step"].to_pylist(), explorer.log()["health"].to_pylist(), strict=True))
    assert found[30] == found[50] == needs + "is gone"
    assert (
        found[40] == f"damaged: needs {history.paths.relative(history.paths.manifest('run-a', 40, 0))}, which is gone"
    )
    assert found[0] == found[20] == "ok"
