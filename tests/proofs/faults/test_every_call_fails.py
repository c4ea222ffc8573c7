"""Every call that a captured training makes to the kernel fails once, in every way that it may fail, or takes long.

Afterwards the training has the weights of one without capture, the next step is committed, all that is committed is
whole and exact, a failure is named, and no thread, descriptor or temporary file is left. `make prove-faults`
tries every call with every error; here is a sample.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from folders import fast_folder
from places import ROOT
from preloaded import fault_injector

import native

PROGRAM = Path(__file__).with_name("fault_sessions.py")
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))
BACKENDS = ["posix", *(["io_uring"] if not native.probe_io_uring() else [])]
ERRORS = ["EIO", "SHORT", "ENOSPC", "EDQUOT", "EINTR", "EAGAIN", "EMFILE", "EROFS", "NEVER"]
FAULTS = [(backend, error) for backend in BACKENDS for error in ERRORS]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600 if EXHAUSTIVE else 300)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder of a file system that is fast: thousands of histories are made."""
    made = fast_folder()
    yield made
    shutil.rmtree(made)


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@pytest.mark.parametrize(("backend", "error"), FAULTS if EXHAUSTIVE else [FAULTS[0], FAULTS[-1]])
def test_a_training_whose_calls_fail(
    folder: Path, backend: str, error: str, figure: Callable[[str, float], None]
) -> None:
    every = "1" if EXHAUSTIVE else "37"
    tried = repetitions("training", str(folder), "--backend", backend, "--errors", error, "--every", every)
    assert len(tried) > (5 if error == "SHORT" else 60 if EXHAUSTIVE else 2)
    assert [one for one in tried if one["wrong"]] == []
    figure("calls failed", len(tried))


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@pytest.mark.parametrize("backend", BACKENDS if EXHAUSTIVE else BACKENDS[-1:])
def test_a_training_that_begins_while_calls_fail(
    folder: Path, backend: str, figure: Callable[[str, float], None]
) -> None:
    """A full disk, a limit or an error at `enable` is named, leaves nothing open and is in nobody's way."""
    arguments = ["--errors", "EIO,ENOSPC,EMFILE,EINTR" if EXHAUSTIVE else "EIO", "--every", "1" if EXHAUSTIVE else "23"]
    tried = repetitions("enable", str(folder), "--backend", backend, *arguments)
    assert len(tried) > (400 if EXHAUSTIVE else 5)
    assert [one for one in tried if one["wrong"]] == []
    figure("calls failed", len(tried))


@pytest.mark.guards("A full or failing disk costs that snapshot only")
def test_an_index_whose_calls_fail_is_rebuilt_by_the_same_process(
    tmp_path: Path, figure: Callable[[str, float], None]
) -> None:
    tried = repetitions("index", str(tmp_path), "--errors", ",".join(ERRORS[:4] if EXHAUSTIVE else ERRORS[:1]))
    assert {"fdatasync", "pwrite", "write"} <= {one["call"] for one in tried}
    assert [one for one in tried if one["wrong"]] == []
    figure("calls failed", len(tried))


def repetitions(*arguments: str) -> list[dict[str, str | None]]:
    """Run the program with its arguments; return what it says of each repetition."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {**os.environ, "LD_PRELOAD": str(fault_injector()), "PYTHONPATH": paths}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
