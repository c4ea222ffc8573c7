"""The figures in the README are those of the committed benchmark."""

import json
import re

import pytest
from places import ROOT

README = (ROOT / "README.md").read_text()
COLUMNS = ("blocked", "durable", "cold read")


def shown():
    rows = re.findall(r"^\| ([\w ._]+?) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|$", README, re.M)
    return {name: dict(zip(COLUMNS, map(float, values), strict=True)) for name, *values in rows}


@pytest.mark.parametrize("name", ["DSHistory", "safetensors", "torch.save", "DCP async_save"])
def test_the_readme_shows_the_committed_medians(name):
    measured = json.loads((ROOT / "benchmarks" / "results" / "save.json").read_text())
    for column, value in shown()[name].items():
        exact = measured["results"][name][column]["median"]
        assert value == pytest.approx(exact, abs=0.0051 if value > 0.05 else 0.00051), column


def test_the_readme_shows_the_committed_training():
    measured = json.loads((ROOT / "benchmarks" / "results" / "training.json").read_text())["results"]
    rows = re.findall(r"^\| ([\w ._,]+?) \| ([\d.]+) x \| ([\d.]+) % \|$", README, re.M)
    assert len(rows) == 6
    for name, step, stall in rows:
        assert float(step) == pytest.approx(measured[name]["against none"]["median"], abs=0.0051), name
        exact = 100 * measured[name]["stall of the step"]["median"]
        assert float(stall) == pytest.approx(exact, abs=0.051 if exact < 10 else 0.51), name


def test_the_readme_shows_the_training_on_another_processor():
    file = ROOT / "benchmarks" / "results" / "xeon" / "training.json"
    measured = json.loads(file.read_text())["results"]
    told = re.search(r"`every=1` takes (\S+) x, with statistics (\S+) x,\nDCP (\S+) x and torch.save (\S+) x", README)
    names = ("DSHistory every 1", "DSHistory every 1, statistics", "DCP async_save every 1", "torch.save every 1")
    for name, value in zip(names, told.groups(), strict=True):
        assert float(value) == pytest.approx(measured[name]["against none"]["median"], abs=0.0051), name


def test_the_readme_shows_the_training_on_an_older_processor():
    file = ROOT / "benchmarks" / "results" / "zen2" / "training.json"
    measured = json.loads(file.read_text())["results"]
    told = re.search(
        r"slower disk it takes (\S+) x, with statistics (\S+) x; there nothing\nbut writing .* takes (\S+) x", README
    )
    names = ("DSHistory every 1", "DSHistory every 1, statistics", "raw O_DIRECT every 1")
    for name, value in zip(names, told.groups(), strict=True):
        assert float(value) == pytest.approx(measured[name]["against none"]["median"], abs=0.0051), name


def test_the_readme_shows_the_redo_log_on_an_older_processor():
    file = ROOT / "benchmarks" / "results" / "zen2" / "redo.json"
    measured = json.loads(file.read_text())["results"]
    told = re.search(r"zen2/redo.md\) (\S+) x in fp32, where nothing but writing as many bytes takes (\S+) x", README)
    for name, value in zip(("redo log", "as many raw bytes"), told.groups(), strict=True):
        assert float(value) == pytest.approx(measured[f"fp32, {name}"]["against none"]["median"], abs=0.0051), name


def test_the_readme_shows_the_committed_queries():
    measured = json.loads((ROOT / "benchmarks" / "results" / "queries.json").read_text())["results"]
    of_history = measured["1,000 checkpoints x 1,000 tensors"]
    rows = re.findall(r"^\| ([\w ]+?)(?: of [\w ]+)?(?:,[\w ]+)? \| (\d+) ms \|$", README, re.M)
    assert len(rows) == 7
    for name, milliseconds in rows:
        assert float(milliseconds) == pytest.approx(1000 * of_history[name]["median"], abs=0.51), name
