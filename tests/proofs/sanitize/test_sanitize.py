"""The extension under test is the one with the sanitizers, when `make test-sanitize` says so."""

import os
from pathlib import Path

import pytest

import native


@pytest.mark.skipif("DSHISTORY_SANITIZED" not in os.environ, reason="runs in `make test-sanitize`")
def test_the_sanitized_extension_is_loaded() -> None:
    assert Path(native.__file__).is_relative_to(os.environ["DSHISTORY_SANITIZED"])
    assert "libasan" in Path("/proc/self/maps").read_text()
