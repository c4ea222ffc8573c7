"""A training restored in a new process continues exactly: losses, batches, weights, moments and random draws."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same
from places import SUPPORT

import capture
from catalog.history import History

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT / "capture_training.py"


def run(history: Path, out: Path, *options: str) -> dict:
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", SCRIPT, history, out, *options], check=True)
    return torch.load(out, weights_only=False)


def assert_same_end(resumed: dict, original: dict) -> None:
    for step, line in resumed["log"].items():
        assert line == original["log"][step], f"step {step}"
    assert_same(resumed["state"], original["state"])
    for key in ("lr", "rng"):
        assert resumed[key] == original[key], key
    assert repr(resumed["scheduler"]) == repr(original["scheduler"])


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> tuple[Path, dict]:
    """The run has 60 steps, nine to an epoch, and captures every tenth."""
    folder = tmp_path_factory.mktemp("original")
    return folder / "history", run(folder / "history", folder / "out.pt")


@pytest.mark.guards("Resume is exact")
@pytest.mark.parametrize("step", [30, 0])
def test_restore_and_train_on(original, tmp_path, step):
    history, ended = original
    resumed = run(history, tmp_path / "out.pt", "--resume", f"{ended['run']}:{step}", "--seed", "77")
    assert sorted(resumed["log"]) == list(range(step + 1, 61))
    assert_same_end(resumed, ended)


def test_the_child_run_knows_its_parent(original, tmp_path):
    history, ended = original
    resumed = run(history, tmp_path / "out.pt", "--resume", f"{ended['run']}:30", "--steps", "40")
    facts = History.open(history).run_facts(resumed["run"])
    assert (facts.parent_run, facts.parent_step) == (ended["run"], 30)


@pytest.mark.long
@pytest.mark.guards("Resume is exact")
def test_with_a_schedule_by_epochs(tmp_path):
    """Step 27 is the last of an epoch: the scheduler steps after it, outside the loop over batches."""
    options = ("--epochs", "--every", "9", "--steps", "40")
    original = run(tmp_path / "history", tmp_path / "a.pt", *options)
    for step in (9, 27):
        resumed = run(tmp_path / "history", tmp_path / "b.pt", "--resume", f"{original['run']}:{step}", *options)
        assert_same_end(resumed, original)


def test_resume_auto(tmp_path):
    """The run starts fresh, resumes from the newest checkpoint, and skips and reports a damaged one."""
    history = tmp_path / "history"
    whole = run(tmp_path / "other", tmp_path / "whole.pt", "--steps", "30")
    first = run(history, tmp_path / "a.pt", "--auto", "--steps", "23")
    second = run(history, tmp_path / "b.pt", "--auto", "--steps", "26")
    assert sorted(second["log"]) == [24, 25, 26]
    opened = History.open(history)
    assert opened.run_facts(first["run"]).parent_run is None
    assert opened.run_facts(second["run"]).parent_step == 23
    data = opened.paths.data(second["run"], 26, 0)
    flip(data, data.stat().st_size // 2)
    third = run(history, tmp_path / "c.pt", "--auto", "--steps", "30")
    assert opened.run_facts(third["run"]).parent_step == 23
    assert_same_end(third, whole)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_metrics_of_every_step_are_in_the_history(original):
    history, ended = original
    rows = (
        History.open(history)
        .query("SELECT step, name, value FROM metrics WHERE run = ? AND name IN ('loss', 'lr')", [ended["run"]])
        .to_pylist()
    )
    losses = {row["step"]: row["value"] for row in rows if row["name"] == "loss"}
    assert losses == {step: line[0] for step, line in ended["log"].items()}
    assert {row["step"] for row in rows if row["name"] == "lr"} == set(range(1, 61))


def test_a_state_dict_of_some_names(original):
    history, ended = original
    part = capture.restore(f"{ended['run']}:30", history=history, names=["inner.*"], kinds=["model", "exp_avg"])
    assert {kind: sorted(tensors) for kind, tensors in part.items()} == {
        "model": ["inner.bias", "inner.weight"],
        "exp_avg": ["inner.bias", "inner.weight"],
    }


def test_objects_on_disk_are_readable_json(original):
    history, ended = original
    opened = History.open(history)
    ref = opened.resolve(f"{ended['run']}:30")
    for extent in opened.extents(ref, kinds=["object"]):
        with (history / extent.file).open("rb") as file:
            file.seek(extent.offset)
            json.loads(file.read(extent.nbytes))
