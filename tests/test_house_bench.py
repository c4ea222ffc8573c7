"""Every benchmark runs through at a tiny size and fills its table; the figures themselves are nobody's promise here."""

import json
import subprocess
import sys

import pytest
from house_helpers import ROOT

from benchmarks.__main__ import SUITES
from benchmarks.training import CONTENDERS


def smoke(name, folder):
    results = folder / "results"
    command = ["-m", "benchmarks", name, "--smoke", "--scratch", str(folder / "scratch"), "--results", str(results)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    assert not (folder / "scratch").exists()
    return json.loads((results / f"{name}.json").read_text()), (results / f"{name}.md").read_text()


@pytest.mark.parametrize("name", SUITES)
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
