"""Every benchmark runs at a tiny size and fills its table; the figures themselves are not tested."""

import json
import subprocess
import sys

import pytest
import torch
from places import ROOT

from benchmarks.__main__ import SUITES
from benchmarks.grid import GATHERED, cells
from benchmarks.hooks import HookClock
from benchmarks.measure import Series, rotations
from benchmarks.readers import READERS, RawReader
from benchmarks.report import markdown
from benchmarks.training import CONTENDERS
from benchmarks.training_state import filled, gpt


def smoke(name, folder):
    results = folder / "results"
    command = ["-m", "benchmarks", name, "--smoke", "--scratch", str(folder / "scratch"), "--results", str(results)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    assert not (folder / "scratch").exists()
    return json.loads((results / f"{name}.json").read_text()), (results / f"{name}.md").read_text()


SAMPLE = ("restore", "statistics", "redo", "compaction")
EACH = [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.exhaustive) for name in SUITES]


@pytest.mark.parametrize("name", EACH)
def test_a_benchmark_fills_its_table(name, tmp_path):
    measured, table = smoke(name, tmp_path)
    columns = set(SUITES[name].COLUMNS)
    assert measured["results"]
    for contender, figures in measured["results"].items():
        assert set(figures) <= columns, contender
        assert all(figure["min"] <= figure["median"] <= figure["max"] for figure in figures.values()), contender
        assert f"| {contender} |" in table
    assert measured["machine"]["cores"] > 0


def test_a_window_of_a_training_holds_a_whole_number_of_saves():
    for contender in CONTENDERS:
        assert contender.steps % contender.every == 0, contender.name


def test_all_and_only_what_hooks_take_between_the_first_and_the_last_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.hooks.time.perf_counter", lambda: now[0])
    training = filled(gpt(1))
    clock = HookClock(training)

    def waits(seconds):
        def hook(*_):
            now[0] += seconds

        return hook

    training.optimizer.register_step_pre_hook(waits(1.0))
    training.optimizer.register_step_post_hook(waits(2.0))
    training.model.register_forward_pre_hook(waits(4.0))
    clock.seal()
    training.model.register_forward_pre_hook(waits(100.0))
    training.model(torch.zeros(1, 8, dtype=torch.long))
    assert clock.take() == 4.0
    training.update()
    assert clock.take() == 3.0
    assert clock.take() == 0.0
    clock.seal()
    training.model(torch.zeros(1, 8, dtype=torch.long))
    assert clock.take() == 104.0


def test_a_peer_that_is_not_here_has_a_row_that_says_why():
    table = markdown("t", "n", {"a": {"x": Series([1.0])}}, {"x": "s", "y": "s"}, {}, skipped={"b": "not installed"})
    assert "| b | not installed | |" in table
    assert table.count("|---|---:|---:|") == 1


def test_contenders_take_turns_and_each_begins_once():
    order = list(rotations("abc", times=3))
    assert "".join(order) == "abcbcacab"


def test_a_grid_holds_each_combination_once_and_both_layouts():
    names = [cell.name for cell in cells((64 << 10, GATHERED))]
    assert len(names) == len(set(names))
    assert not any("a file each" in name and "coalesced" in name for name in names)
    assert any("O_DIRECT, by sectors, coalesced" in name for name in names)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_puts_back_what_it_saved(reader, tmp_path):
    training = filled(gpt(1))
    way = reader()
    way.save(training, tmp_path)
    kept = {name: tensor.clone() for name, tensor in training.tensors().items()}
    for tensor in training.tensors().values():
        tensor.zero_()
    way.whole(training)
    if reader is not RawReader:  # the reader for the disk's limit restores no state
        assert all(torch.equal(tensor, kept[name]) for name, tensor in training.tensors().items())
