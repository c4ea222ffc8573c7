"""Bisect finds the turn and evaluates both ends first, and every error names its checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Piece, Run, extended_shell, whole

from catalog.errors import MismatchError, NotFoundError, SetupError
from catalog.records import CheckpointRef
from dshistory.commands.cli import main
from dshistory.explorer import Explorer
from dshistory.trends.bisect import Bisection, Checkpoint

STEPS = range(0, 200, 10)
FAULT = 70


def loss_at(step: int) -> float:
    return 9.0 if step >= FAULT else 4.0 - step / 100


@pytest.fixture(scope="module")
def h(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    """Run `parent` to step 90 and `child` from its step 40 on.

    Weights are 1, and NaN from step 150 on; step 0 has no loss.
    """
    root = tmp_path_factory.mktemp("bisect") / "history"
    parent = Run(root, "parent")
    child = Run(root, "child", parent=("parent", 40), created="2026-11-21T10:15:09+00:00")
    for step in STEPS:
        weights = {"embedding": torch.full((4,), math.nan if step >= 150 else 1.0), "norm": torch.ones(2)}
        for run in [parent] * (step <= 90) + [child] * (step > 40):
            run.checkpoint(step, whole(weights), **({"loss": loss_at(step)} if step else {}))
    parent.close()
    child.close()
    return Explorer.open(root)


def broken(checkpoint: Checkpoint) -> bool:
    return not bool(checkpoint.tensor("embedding").isfinite().all())


def refs(found: Bisection) -> tuple[str, str]:
    return str(found.before), str(found.first)


@pytest.mark.parametrize("fault", [10, 20, 40, 50, 100, 190])
def test_every_turn_is_found_with_few_questions(h: Explorer, fault: int) -> None:
    asked = []

    def holds(checkpoint: Checkpoint) -> bool:
        asked.append(checkpoint.step)
        return checkpoint.step >= fault

    found = h.bisect(holds, quiet=True)
    assert (found.before.step, found.first.step) == (fault - 10, fault)
    assert len(asked) == len(set(asked)) == len(found) <= 2 + math.ceil(math.log2(len(STEPS)))
    assert asked == found["step"].to_pylist()
    assert asked[:2] == [STEPS[0], STEPS[-1]]
    assert found["holds"].to_pylist() == [step >= fault for step in asked]


def test_the_turn_is_what_a_diff_takes_across_the_fork_too(h: Explorer) -> None:
    found = h.bisect(lambda checkpoint: checkpoint.step > 40)
    assert refs(found) == ("parent:40", "child:50")
    assert len(h.diff(found.before, found.first)) == 2
    assert "not yet at parent:40, but at child:50" in repr(found)


def test_tensors_are_read_by_name(h: Explorer) -> None:
    assert refs(h.bisect(broken)) == ("child:140", "child:150")


def test_a_state_dict_goes_into_a_module_with_tied_names_too(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    for step, value in enumerate([1.0, 2.0, 3.0]):
        run.checkpoint(step, [Piece("tokens.weight", torch.full((2, 2), value), aliases=("head.weight",))])
    run.close()
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(2, 2), "head": torch.nn.Linear(2, 2, bias=False)})

    def grown(checkpoint: Checkpoint) -> torch.Tensor:
        model.load_state_dict(checkpoint.state_dict())
        return model["head"].weight.sum() > 10

    assert Explorer.open(run.root).bisect(grown).first.step == 2


def test_a_metric_condition_as_text_uses_recorded_values(h: Explorer) -> None:
    found = h.bisect("loss > 5")
    assert found.first == CheckpointRef("child", FAULT)
    assert found["step"].to_pylist()[0] == 10
    assert {row["step"]: row["value"] for row in found}[60] == pytest.approx(3.4)
    assert h.bisect("loss >= 9.0", run="parent").first == CheckpointRef("parent", FAULT)
    assert h.bisect(lambda checkpoint: checkpoint.metrics.get("loss", 0) > 5).first == found.first


def test_the_ends_can_be_chosen_as_steps_of_the_run_or_as_references(h: Explorer) -> None:
    found = h.bisect("loss > 5", 60, "parent:80", run="parent")
    assert refs(found) == ("parent:60", "parent:70")
    assert "3 of 3 checkpoints asked" in found.note
    assert h.bisect("loss > 5", "child:60", -1).first == CheckpointRef("child", FAULT)
    with pytest.raises(NotFoundError, match=r"bad=parent:80 is none of the 19 .* of run child"):
        h.bisect("loss > 5", 60, "parent:80")
    with pytest.raises(NotFoundError, match=r"good=65 is none of .* nearest are 60 and 70"):
        h.bisect("loss > 5", 65)
    assert h.bisect("loss > 5", bad=-1, run="parent")[1]["step"] == 90
    with pytest.raises(SetupError, match="good=child:80 must come before bad=child:60"):
        h.bisect("loss > 5", 80, 60)


@pytest.mark.parametrize(
    ("holds", "advice"),
    [
        (lambda step: True, "gives True, at bad=child:190 True.*earlier good"),
        (lambda step: False, "gives False, at bad=child:190 False.*later bad"),
        (lambda step: step < 50, "gives True, at bad=child:190 False.*opposite"),
    ],
)
def test_ends_that_do_not_differ_as_required_are_refused(
    h: Explorer, holds: Callable[[int], bool], advice: str
) -> None:
    asked = []

    def predicate(checkpoint: Checkpoint) -> bool:
        asked.append(checkpoint.step)
        return holds(checkpoint.step)

    with pytest.raises(MismatchError, match=advice):
        h.bisect(predicate)
    assert asked == [0, 190]


def test_what_only_the_metrics_between_checkpoints_show_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(1, 31):
        lr = {13: math.nan, 17: 1.0}.get(step, 0.001)
        if step % 10:
            run.metrics(step, lr=lr)
        else:
            run.checkpoint(step, whole({"w": torch.ones(2)}), lr=lr)
    run.close()
    with pytest.raises(
        MismatchError, match=r"first at step 17 of run run-a \(1\), after the checkpoint run-a:10: .* run-a:20"
    ):
        Explorer.open(tmp_path).bisect("lr > 0.5")
    with pytest.raises(MismatchError, match=r"or a predicate that holds there$"):
        Explorer.open(tmp_path).bisect("lr > 2")


def test_the_values_of_a_metric_are_in_the_refusal(h: Explorer) -> None:
    with pytest.raises(MismatchError, match=r"good=parent:10 .*gives 3\.9, at bad=child:190 9:"):
        h.bisect("loss > 10")


def test_a_condition_that_comes_and_goes_has_a_turn_but_not_surely_the_first_one(h: Explorer) -> None:
    # The condition holds at 10 and 20, and again from 120 on: the search never sees the beginning.
    found = h.bisect(lambda checkpoint: checkpoint.step in (10, 20) or checkpoint.step >= 120)
    assert refs(found) == ("child:110", "child:120")
    assert "first, if from there on" in found.note


@pytest.mark.parametrize(
    ("predicate", "said"),
    [
        (
            lambda checkpoint: checkpoint.tensor("embeding").sum() > 0,
            r"parent:0: NotFoundError: no tensor fits 'embeding'",
        ),
        (lambda checkpoint: checkpoint.metrics["loss"] > 5, r"failed at checkpoint parent:0: KeyError: 'loss'"),
        (
            lambda checkpoint: checkpoint.tensor("norm") > 5,
            r"failed at checkpoint parent:0: RuntimeError: Boolean value",
        ),
        (lambda checkpoint: None, r"gave None at checkpoint parent:0"),
        (42, r"predicate=42: give a condition, as 'loss > 4\.5'"),
        ("loss", r"'loss' is not understood"),
        ("loss > high", r"'loss > high' is not understood"),
    ],
)
def test_errors_name_the_checkpoint_or_the_text(h: Explorer, predicate: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        h.bisect(predicate)


def test_a_metric_that_is_not_there_or_not_a_number(h: Explorer, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no metric 'los' was recorded; the nearest is loss"):
        h.bisect("los > 5")
    run = Run(tmp_path / "history")
    run.checkpoint(0, whole({"w": torch.ones(1)}))
    for step, loss in enumerate([1.0, math.nan, math.nan], start=1):
        run.checkpoint(step, whole({"w": torch.ones(1)}), loss=loss)
    run.close()
    with pytest.raises(SetupError, match="a value of loss is NaN") as told:
        Explorer.open(run.root).bisect("loss > 5")
    advice = eval(str(told.value).partition(", as ")[2])
    assert Explorer.open(run.root).bisect(advice).first.step == 2


def test_a_predicate_on_a_model_gets_it_with_the_weights_of_each_checkpoint(h: Explorer) -> None:
    model = torch.nn.Module()
    model.embedding = torch.nn.Parameter(torch.full((4,), 7.0))
    model.norm = torch.nn.Parameter(torch.zeros(2))
    asked = []

    def has_nan(given: torch.nn.Module) -> torch.Tensor:
        asked.append((given.training, given.norm.tolist()))
        return given.embedding.isnan().any()

    found = h.bisect(has_nan, model=model, quiet=True)
    assert refs(found) == ("child:140", "child:150")
    assert asked == [(False, [1.0, 1.0])] * len(found)
    assert model.training
    assert model.embedding.tolist() == [7.0] * 4
    with pytest.raises(SetupError, match=r"failed at checkpoint parent:0: ValueError: no"):
        h.bisect(lambda given: exec("raise ValueError('no')"), model=model)
    assert model.embedding.tolist() == [7.0] * 4
    with pytest.raises(SetupError, match="'loss > 5' is about a metric, which needs no model="):
        h.bisect("loss > 5", model=model)


def test_one_checkpoint_is_too_few(tmp_path: Path) -> None:
    run = Run(tmp_path / "history")
    run.checkpoint(5, whole({"w": torch.ones(1)}))
    run.close()
    with pytest.raises(NotFoundError, match="1 checkpoint to ask; it takes two"):
        Explorer.open(run.root).bisect(broken)


def test_the_metric_form_is_a_command_and_a_magic(h: Explorer, capsys: Any, tmp_path: Path) -> None:
    assert main(["bisect", str(h.root), "loss > 5", "20", "latest"]) == 0
    assert "not yet at child:60, but at child:70" in capsys.readouterr().out
    with extended_shell(tmp_path) as shell:
        shell.run_line_magic("dshistory", f"open {h.root}")
        assert shell.run_line_magic("dshistory", "bisect 'loss > 5' --run parent").first.run == "parent"
