"""Settings and fixtures that all tests share.

Torch uses one thread, so that parallel tests do not compete for the cores. Caches belong to the tests alone, and no
test may leave a thread behind. A test can record figures, which `--figures FILE` collects for docs/guarantees.md.
"""

import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
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
        # The lowest priority is theirs, on a machine that others may use up.
        thread.join(60)
    names = [thread.name for thread in left if thread.is_alive()]
    assert not names, f"the test has ended and left threads behind: {names}"


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Return a function that records what the test counted or measured, as `figure("states opened", 1234)`. Over the
    parameters of a test, whole numbers are added up, and of other numbers the largest is kept.
    """
    return lambda name, value: record_property(f"{_FIGURE}{name}", value)


_FIGURE = "figure: "
_figures: dict[str, dict[str, float]] = {}


def pytest_collection_finish() -> None:
    """Freeze what the tests have imported: neither collections nor `gc.get_objects` go through it again. So an
    optimizer or an average that a test module makes at its top is not found by `enable`."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--figures`."""
    parser.addoption("--figures", metavar="FILE", help="write the figures that passing tests record, as JSON")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the figures of a test that has passed; with several workers, in the process that collects for all."""
    if report.when != "call" or not report.passed:
        return
    for key, value in report.user_properties:
        if key.startswith(_FIGURE) and isinstance(value, int | float):
            figures = _figures.setdefault(report.nodeid.split("[")[0], {})
            name = key.removeprefix(_FIGURE)
            before = figures.get(name, 0)
            figures[name] = before + value if isinstance(value, int) else max(before, value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the collected figures."""
    file = session.config.getoption("--figures")
    if file and not hasattr(session.config, "workerinput"):
        Path(file).write_text(json.dumps(_figures, indent=1, sort_keys=True))
