"""Importing a package is cheap: nothing heavy comes along before it is used."""

import json

import pytest
from project_helpers import run_python

HEAVY = (
    "torch",
    "duckdb",
    "deepspeed",
    "transformers",
    "accelerate",
    "pandas",
    "plotly",
    "ipywidgets",
    "IPython",
    "tqdm",
    "pyarrow.parquet",
)


def heavy_after(statement, cwd):
    program = f"import json, sys\n{statement}\nprint(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    return set(json.loads(run_python("-c", program, cwd=cwd).splitlines()[-1]))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import native", set()),
        ("import catalog", set()),
        ("import dshistory", set()),
        ("import capture", {"torch", "tqdm", "pyarrow.parquet"}),  # torch brings tqdm
    ],
)
def test_an_import_brings_nothing_heavy(statement, allowed, tmp_path):
    assert heavy_after(statement, tmp_path) <= allowed


def test_capture_can_be_had_from_the_facade(tmp_path):
    assert "True" in run_python(
        "-c", "from dshistory import capture as a; import capture as b; print(a is b)", cwd=tmp_path
    )
