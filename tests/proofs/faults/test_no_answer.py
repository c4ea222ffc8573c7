"""A disk that does not answer: the training waits and says for what, goes on when the answer comes, and may be left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from capture_helpers import committed_steps
from places import ROOT, SUPPORT
from preloaded import fault_injector

import native
from catalog.history import History
from catalog.verify import verify

BACKEND = "posix" if native.probe_io_uring() else "io_uring"
PATIENCE_S = 40
NEVER = -2
AT = 3
"""The call is made by the session's own threads, in the middle of the snapshot of step 1."""

SCRIPT = """
import ctypes, os, sys, threading, time
from capture_helpers import make, one_step
import capture
import capture.publishing.stall_notice, capture.session.session
capture.publishing.stall_notice.SAY_EVERY_S = 0.1
capture.session.session._GIVE_UP_LIMIT_S = 0.5
injector = ctypes.CDLL(None)
injector.injector_name.restype = ctypes.c_char_p
model, optimizer = make(256)
session = capture.enable(
    model, optimizer=optimizer, every=1, history={history!r}, backend={backend!r}, budget_bytes=8 << 20, stats_every=0
)
session.wait()

def answer():
    while not injector.injector_name():
        time.sleep(0.01)
    print("reached", flush=True)
    if sys.stdin.readline():
        injector.injector_disarm()

threading.Thread(target=answer, daemon=True).start()
injector.injector_arm({history!r}.encode(), ctypes.c_long({at}), {never})
left = 0
while True:
    try:
        if left == 0:
            one_step(model, optimizer)
            one_step(model, optimizer)
        session.close()
        break
    except KeyboardInterrupt:
        left += 1
        print("left", flush=True)
        if left == 2:
            sys.exit(5)
print("closed with", len(session.failures), "failures", flush=True)
"""


@pytest.fixture
def training(history: Path) -> "Iterator[subprocess.Popen[str]]":
    """Start a training one of whose calls does not return until a line comes."""
    script = SCRIPT.format(history=str(history), backend=BACKEND, at=AT, never=NEVER)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(fault_injector()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)]),
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def told(training: "subprocess.Popen[str]") -> Callable[[], None]:
    """Return a function that returns once the training has said what it waits for."""

    def read() -> None:
        assert training.stderr is not None
        lines = []
        for line in training.stderr:
            # The first step, before the call, may take long as well.
            if "has been under way for more than" in line and "step 0" not in line:
                return
            lines.append(line)
        raise AssertionError("".join(lines))

    return read


@pytest.mark.guards("The training goes on")
@pytest.mark.slow
def test_a_late_answer_is_waited_for_and_said(training, told, history) -> None:
    assert training.stdout.readline() == "reached\n"
    told()
    said, errors = training.communicate("go on\n", timeout=PATIENCE_S)
    assert (training.returncode, said) == (0, "closed with 0 failures\n"), errors
    (facts,) = History.open(history).runs()
    assert committed_steps(history, facts.run) == [0, 1, 2]
    assert verify(History.open(history)) == []


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
def test_ctrl_c_leaves_a_disk_that_never_answers(training, told, history) -> None:
    """The barrier or `close` is left, `close` again, and the exit waits for a limit only."""
    assert training.stdout.readline() == "reached\n"
    for _ in range(2):
        told()
        training.send_signal(signal.SIGINT)
        assert training.stdout.readline() == "left\n"
    said, errors = training.communicate(timeout=PATIENCE_S)
    assert (training.returncode, said) == (5, ""), errors
    assert "the process ends while a write to" in errors
    (facts,) = History.open(history).runs()
    assert committed_steps(history, facts.run)[0] == 0
    assert verify(History.open(history)) == []
