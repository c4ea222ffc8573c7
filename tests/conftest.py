"""What every test shares: one thread for torch, so that tests side by side do not fight for the cores; caches of its own; no thread left behind."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the Makefile has it, also for those who call pytest themselves: DeepSpeed's extensions belong to the environment.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
# What is measured of this machine's disk stays out of the account's own memory.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"dshistory-tests-{os.getuid()}")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Where a test's history goes; not made yet."""
    return tmp_path / "history"


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Whatever a test opened or was refused, no thread of ours outlives it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dshistory-")]
    for thread in left:
        thread.join(5)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"the test has ended and left threads behind: {names}"
