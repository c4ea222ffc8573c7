"""The extension under test is the one with the sanitizers, when `make test-sanitize` says so, and no test of it is
forgotten there."""

import os
from pathlib import Path

import pytest
from places import ROOT
from sanitize import NOT_SANITIZED, native_tests

import native


@pytest.mark.skipif("DSHISTORY_SANITIZED" not in os.environ, reason="runs in `make test-sanitize`")
def test_the_sanitized_extension_is_loaded() -> None:
    assert Path(native.__file__).is_relative_to(os.environ["DSHISTORY_SANITIZED"])
    assert "libasan" in Path("/proc/self/maps").read_text()


def test_every_test_of_the_extension_runs_or_is_left_out_by_name() -> None:
    found = {path.name for path in (ROOT / "tests" / "native").glob("test_*.py")}
    run = {Path(name).name for name in native_tests()}
    assert run | {f"test_{name}.py" for name in NOT_SANITIZED} == found
    assert not run & {f"test_{name}.py" for name in NOT_SANITIZED}
