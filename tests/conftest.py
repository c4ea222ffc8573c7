"""Settings and fixtures that all tests share.

Torch uses one thread, so that parallel tests do not compete for the cores. Caches belong to the tests alone, and no
test may leave a thread behind.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# DeepSpeed's extensions are built in the virtual environment, as in the Makefile, also when pytest is called directly.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
# Measurements of this machine's disk stay out of the account's cache folder.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"dshistory-tests-{os.getuid()}")


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Return the path of the test's history, which does not exist yet."""
    return tmp_path / "history"


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Assert that no thread of the project outlives the test, whatever it opened."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("dshistory-")]
    for thread in left:
        thread.join(5)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"the test has ended and left threads behind: {names}"
