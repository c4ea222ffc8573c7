"""What every test shares: one thread for torch, so that tests side by side do not fight for the cores."""

import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is measured of this machine's disk stays out of the account's own memory.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"dshistory-tests-{os.getuid()}")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Where a test's history goes; not made yet."""
    return tmp_path / "history"
