"""The extension under test is the one with the sanitizers, when `make test-sanitize` says so, in every process, and no
test of it is forgotten there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from sanitize import FORKING, NOT_SANITIZED, native_tests

import native._core

LOADED = """
import native._core
from pathlib import Path
print(native._core.__file__)
assert "libasan" in Path("/proc/self/maps").read_text()
"""

sanitized = pytest.mark.skipif("DSHISTORY_SANITIZED" not in os.environ, reason="runs in `make test-sanitize`")


@sanitized
def test_the_sanitized_extension_is_loaded() -> None:
    assert Path(native._core.__file__).is_relative_to(os.environ["DSHISTORY_SANITIZED"])
    assert "libasan" in Path("/proc/self/maps").read_text()


@sanitized
def test_a_process_that_a_test_starts_loads_it_too() -> None:
    loaded = subprocess.run([sys.executable, "-c", LOADED], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert Path(loaded.strip()).is_relative_to(os.environ["DSHISTORY_SANITIZED"])


def test_every_test_of_the_extension_runs_or_is_left_out_by_name() -> None:
    found = {path.name for path in (ROOT / "tests" / "native").glob("test_*.py")}
    run = {Path(name).name for name in native_tests()}
    assert run | {f"test_{name}.py" for name in NOT_SANITIZED} == found
    assert not run & {f"test_{name}.py" for name in NOT_SANITIZED}


def test_every_test_that_forks_is_left_out() -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "tests" / "native").glob("test_*.py")}
    forking = {
        f"{name}::{one.name}"
        for name, source in sources.items()
        for one in ast.parse(source).body
        if isinstance(one, ast.FunctionDef) and "os.fork()" in (ast.get_source_segment(source, one) or "")
    }
    assert forking == set(FORKING)
