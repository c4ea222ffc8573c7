"""What every test shares: one thread for torch, so that tests side by side do not fight for the cores."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Where a test's history goes; not made yet."""
    return tmp_path / "history"
