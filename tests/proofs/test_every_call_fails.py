"""Every call that a captured training makes to the kernel fails once, in every way that it may fail.

Afterwards the training has the weights of one without capture, the next step is committed, all that is committed is
whole and exact, a failure is named, and no thread, descriptor or temporary file is left. `make prove-faults`
tries every call with every error; here is a sample.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

import native

PROGRAM = Path(__file__).with_name("fault_sessions.py")
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))
BACKENDS = ["posix", *(["io_uring"] if not native.probe_io_uring() else [])]
ERRORS = ["EIO", "SHORT", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "EMFILE", "EROFS"]
FAULTS = [(backend, error) for backend in BACKENDS for error in ERRORS]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if EXHAUSTIVE else 300)]


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that fails calls, compiled."""
    library = tmp_path_factory.mktemp("injector") / "fault_injector.so"
    source = PROGRAM.with_name("fault_injector.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@pytest.mark.parametrize(("backend", "error"), FAULTS if EXHAUSTIVE else [FAULTS[0], FAULTS[-7]])
def test_a_training_whose_calls_fail(
    injector: Path, tmp_path: Path, backend: str, error: str, figure: Callable[[str, float], None]
) -> None:
    every = "1" if EXHAUSTIVE else "61"
    tried = repetitions(injector, "training", str(tmp_path), "--backend", backend, "--errors", error, "--every", every)
    assert len(tried) > (5 if error == "SHORT" else 60 if EXHAUSTIVE else 2)
    assert [one for one in tried if one["wrong"]] == []
    figure("calls failed", len(tried))


@pytest.mark.guards("A full or failing disk costs that snapshot only")
def test_an_index_whose_calls_fail_is_rebuilt_by_the_same_process(
    injector: Path, tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    tried = repetitions(
        injector, "index", str(tmp_path), "--errors", ",".join(ERRORS[:4] if EXHAUSTIVE else ERRORS[:1])
    )
    assert {"fdatasync", "pwrite", "write"} <= {one["call"] for one in tried}
    assert [one for one in tried if one["wrong"]] == []
    figure("calls failed", len(tried))


def repetitions(injector: Path, *arguments: str) -> list[dict[str, str | None]]:
    """Run the program with its arguments; return what it says of each repetition."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "LD_PRELOAD": str(injector), "PYTHONPATH": paths}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
