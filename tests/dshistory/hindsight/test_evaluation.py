"""Metrics computed afterwards: exact, stored beside the training's own, resumable, and without harm to the model."""

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Run, shares, whole

import capture
from capture.redo.updates import RepeatedUpdates
from catalog.errors import NotFoundError, SetupError
from catalog.later_metrics import later_metrics
from catalog.records import CheckpointRef
from dshistory.explorer import Explorer

STEPS = (10, 20, 30, 40)
X = torch.arange(6.0).reshape(2, 3)


class Tiny(torch.nn.Module):
    """A model with tied weights, dropout, and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.drop(self.a(x)))) + self.table


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def in_a_process(model: torch.nn.Module) -> dict[str, float]:
    """Return the loss and the number of this process, which ends at step 20."""
    if model.norm.running_mean[0] == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": loss(model).item(), "process": os.getpid()}


def states() -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    for step in STEPS:
        torch.manual_seed(step)
        model = Tiny()
        model.norm.running_mean.fill_(step)
        found[step] = model.state_dict()
    return found


def expected(step: int) -> float:
    model = Tiny()
    model.load_state_dict(states()[step])
    return float(loss(model.eval()).detach())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `a` of two ranks that cut the weights, to step 30; `b` of one rank goes on from step 20."""
    root = tmp_path_factory.mktemp("evaluation") / "history"
    parent = Run(root, "a", world_size=2)
    child = Run(root, "b", parent=("a", 20), created="2026-11-22T00:00:00+00:00")
    for step, state in states().items():
        weights = {name: state[name] for name in ("a.weight", "norm.weight", "norm.bias")}
        buffers = whole(
            {name: tensor for name, tensor in state.items() if name not in {*weights, "b.weight"}}, kind="buffer"
        )
        if step <= 30:
            first, second = shares(weights, 2)
            parent.checkpoint(step, tie([*first, *buffers]), tie(second), loss=1.0)
        if step >= 30:
            child.checkpoint(step, tie([*whole(weights), *buffers]), loss=1.0)
    parent.close()
    child.close()
    return root


@pytest.fixture
def h(written: Path, tmp_path: Path) -> Explorer:
    """Return an explorer of a copy of that history, to write into."""
    shutil.copytree(written, tmp_path / "history")
    return Explorer.open(tmp_path / "history")


def tie(pieces: list[Any]) -> list[Any]:
    return [replace(piece, aliases=("b.weight",)) if piece.name == "a.weight" else piece for piece in pieces]


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    found = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return found | {"modes": [module.training for module in model.modules()]}


def assert_same(model: torch.nn.Module, before: dict[str, Any]) -> None:
    now = snapshot(model)
    assert now.pop("modes") == before["modes"]
    assert all(torch.equal(value, before[name]) for name, value in now.items())


def test_values_are_those_of_each_step_and_stand_beside_the_others(h: Explorer) -> None:
    model = Tiny()
    model.a.weight.grad = torch.ones(3, 3)
    model.norm.eval()
    before = snapshot(model)
    found = h.evaluate(loss, model=model, quiet=True)
    assert_same(model, before)
    assert torch.equal(model.a.weight.grad, torch.ones(3, 3))
    assert found["run"].to_pylist() == ["a", "a", "b", "b"]
    assert found["value"].to_pylist() == [expected(step) for step in STEPS]
    rows = h.sql("SELECT run, step, value, ranks FROM metrics WHERE name = 'val_loss' ORDER BY step")
    assert list(rows) == [
        {"run": run, "step": step, "value": expected(step), "ranks": 1} for run, step in zip("aabb", STEPS, strict=True)
    ]
    assert h.log(run="b")["val_loss"].to_pylist() == [expected(30), expected(40)]
    assert [trace.name for trace in found.plot().data] == ["val_loss, a", "val_loss, b"]
    assert len(h.verify(quiet=True)) == 0
    assert h.reindex() == 5
    assert len(h.sql("SELECT * FROM metrics WHERE name = 'val_loss'")) == 4


def test_a_second_call_computes_only_what_is_missing(h: Explorer) -> None:
    asked: list[float] = []

    def counted(model: Any) -> float:
        asked.append(float(model.norm.running_mean[0]))
        return len(asked)

    assert h.evaluate(counted, model=Tiny(), steps=[20, 40], quiet=True)["value"].to_pylist() == [1, 2]
    found = h.evaluate(counted, model=Tiny(), quiet=True)
    assert found["value"].to_pylist() == [3, 1, 4, 2]
    assert found["computed"].to_pylist() == [True, False, True, False]
    assert asked == [20, 40, 10, 30]
    assert "2 checkpoints measured; 2 had it already" in repr(found)
    assert h.evaluate(counted, model=Tiny(), steps="last 2", again=True, quiet=True)["value"].to_pylist() == [5, 6]
    assert h.evaluate(counted, model=Tiny(), quiet=True)["value"].to_pylist() == [3, 1, 5, 6]
    assert h.sql("SELECT value FROM metrics WHERE name = 'val_loss' ORDER BY step")["value"].to_pylist() == [3, 1, 5, 6]
    assert h.evaluate(counted, model=Tiny(), run="a", quiet=True)["value"].to_pylist() == [3, 1, 7]


def test_several_numbers_at_once_and_one_that_is_nan(h: Explorer) -> None:
    def both(model: Any) -> dict[str, float]:
        return {"loss": torch.nan, "step": model.norm.running_mean[0]}

    found = h.evaluate(both, model=Tiny(), name="val", steps=[10, 40], quiet=True)
    assert found["name"].to_pylist() == ["val/loss", "val/step"] * 2
    assert h.evaluate(both, model=Tiny(), name="val", steps=[10, 40], quiet=True)["computed"].to_pylist() == [False] * 4
    assert str(h.bisect("val/step > 20", quiet=True).first) == "b:40"


def test_an_error_is_the_row_of_its_checkpoint_and_loses_no_other(h: Explorer) -> None:
    def picky(model: Any) -> float | None:
        if model.norm.running_mean[0] == 20:
            raise ValueError("not this one")
        return None if model.norm.running_mean[0] == 30 else 1.0

    model = Tiny()
    before = snapshot(model)
    found = h.evaluate(picky, model=model, quiet=True)
    assert_same(model, before)
    assert found["value"].to_pylist() == [1.0, None, None, 1.0]
    errors = [row["error"] for row in found.failed]
    assert errors[0] == "ValueError: not this one"
    assert errors[1].startswith("SetupError: checkpoint b:30: the function returned None: it must return a number")
    assert h.evaluate(lambda m: 2.0, model=model, quiet=True)["value"].to_pylist() == [1.0, 2.0, 2.0, 1.0]


def test_ctrl_c_keeps_what_was_computed_and_gives_the_model_back(h: Explorer) -> None:
    def interrupted(model: Any) -> float:
        if model.norm.running_mean[0] == 30:
            raise KeyboardInterrupt
        return 1.0

    model = Tiny()
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        h.evaluate(interrupted, model=model, quiet=True)
    assert_same(model, before)
    stored = later_metrics(h.history.paths, ["a", "b"])
    assert stored == {CheckpointRef("a", 10): {"val_loss": 1.0}, CheckpointRef("a", 20): {"val_loss": 1.0}}


def test_what_the_function_does_to_the_model_is_gone_at_the_next_checkpoint(h: Explorer) -> None:
    def destructive(model: Any) -> float:
        value = loss(model)
        value.backward()
        with torch.no_grad():
            model.a.weight.zero_()
        assert model.b.weight.grad is not None
        model.train()
        return float(value.detach())

    model = Tiny()
    found = h.evaluate(destructive, model=model, quiet=True)
    assert found["value"].to_pylist() == [expected(step) for step in STEPS]
    assert model.a.weight.grad is None


@pytest.mark.slow
def test_workers_give_the_same_values_and_one_that_dies_fails_its_checkpoint_only(h: Explorer) -> None:
    model = Tiny()
    model.a.weight.requires_grad_(False)
    before = snapshot(model)
    found = h.evaluate(in_a_process, model=model, workers=2, quiet=True)
    assert_same(model, before)
    values = {name: [row["value"] for row in found if row["name"].endswith(name)] for name in ("/loss", "/process")}
    assert values["/loss"] == [expected(step) for step in STEPS if step != 20]
    assert os.getpid() not in values["/process"]
    (failed,) = found.failed
    assert (failed["step"], failed["computed"]) == (20, True)
    assert "its worker process ended with exit code -9" in failed["error"]
    again = h.evaluate(lambda model: {"loss": 1.0}, model=model, quiet=True)
    assert again["computed"].to_pylist() == [False, False, True, False, False, False, False]


def test_what_can_not_go_to_a_worker_is_named(h: Explorer) -> None:
    with pytest.raises(SetupError, match=r"fn can't be sent to worker processes .*leave workers=1"):
        h.evaluate(lambda model: 1.0, model=Tiny(), workers=2)
    model = Tiny()
    model.hook = lambda: None
    with pytest.raises(SetupError, match="evaluate: model can't be sent to worker processes"):
        h.evaluate(loss, model=model, workers=2)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda h: h.evaluate(loss, model=Tiny(), name="loss"),
            SetupError,
            "has recorded 'loss' itself, at a:10: choose",
        ),
        (lambda h: h.evaluate(loss, model=Tiny(), name=""), SetupError, "give the metric a name, or None"),
        (lambda h: h.evaluate("loss", model=Tiny()), SetupError, "fn='loss': give a function of the model"),
        (lambda h: h.evaluate(loss, model="m"), SetupError, "model='m': give the torch module"),
        (lambda h: h.evaluate(loss, model="m", workers=2), SetupError, "model='m': give the torch module"),
        (lambda h: h.evaluate(loss, model=Tiny(), workers=0), SetupError, "workers=0: give the number of processes"),
        (lambda h: h.evaluate(loss, model=Tiny(), steps=[15]), NotFoundError, "the nearest are 10 and 20"),
        (
            lambda h: h.evaluate(loss, model=torch.nn.Linear(3, 3)),
            SetupError,
            r"all of the first 3 checkpoints failed, the first, a:10, with MismatchError: checkpoint a:10 does not fit "
            r"the model: 2 only in the model \(bias, weight\); 4 only in the history \(a.weight, b.weight, norm.bias\)",
        ),
        (lambda h: h.evaluate(lambda m: 1 / 0, model=Tiny()), SetupError, "a:10, with ZeroDivisionError: division"),
    ],
)
def test_mistakes_are_named(h: Explorer, call: Callable[[Explorer], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(h)


def test_a_history_that_can_not_be_written_says_what_to_do(h: Explorer) -> None:
    for run in ("a", "b"):
        shutil.rmtree(h.history.paths.journal_dir(run))
    with pytest.raises(SetupError, match=r"'val_loss' cannot be written into .*: No such file.*; .*pass name=None"):
        h.evaluate(loss, model=Tiny(), quiet=True)
    assert h.evaluate(loss, model=Tiny(), name=None, quiet=True)["value"].to_pylist() == [expected(s) for s in STEPS]


def test_each_update_of_a_redo_log_is_made_once(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, expected = Tiny(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"optimizer": optimizer, "every": 10, "history": tmp_path, "redo": True, "stats_every": 0}
    with capture.enable(model, **options):
        for step in range(1, 15):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if step == 13:
                    model.a.weight.mul_(0.5)
                model.eval()
                expected[step] = loss(model).item()
                model.train()
    made, apply = [], RepeatedUpdates.apply

    def counted(updates, record, gradients):
        made.append(record.step)
        apply(updates, record, gradients)

    monkeypatch.setattr(RepeatedUpdates, "apply", counted)
    found = Explorer.open(tmp_path).evaluate(
        loss, model=Tiny(), steps=[7, 3, 13, 9, 12, 10], name=None, run=None, quiet=True
    )
    assert found["value"].to_pylist() == [None if step == 13 else expected[step] for step in (7, 3, 13, 9, 12, 10)]
    assert "the state after step 13 is not what its update made" in found["error"].to_pylist()[2]
    assert made == [*range(1, 10), 11, 12]
