"""After SIGKILL of a real training the history opens, committed checkpoints verify, and training resumes from it."""

import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, make, reference
from places import SUPPORT

import capture
import dshistory
from catalog.history import History
from catalog.verify import verify

pytestmark = pytest.mark.slow

SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from capture_helpers import make, one_step
import capture
model, optimizer = make(256)
session = capture.enable(model, optimizer=optimizer, every=1, history={history!r}, resume="auto", budget_bytes=16 << 20)
while True:
    one_step(model, optimizer)
    print("stepped", flush=True)
"""


def kill_after(history: Path, *, steps: int, bytes_more: int) -> None:
    """Kill the training at a point drawn from its own progress: after some steps, then some more written bytes."""
    script = SCRIPT.format(tests=str(SUPPORT), history=str(history))
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        for _ in range(steps):
            assert process.stdout.readline(), "the training ended by itself"
        began = written(process.pid)
        while written(process.pid) < began + bytes_more and process.poll() is None:
            select.select([process.stdout], [], [], 0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def written(pid: int) -> int:
    """Return the number of bytes that a process has handed to write calls so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_killed_training_loses_only_what_was_not_committed(history):
    """`make prove-kills` kills hundreds."""
    draw = random.Random(0)
    ran = set()
    for _ in range(3):
        kill_after(history, steps=draw.randint(1, 6), bytes_more=draw.randrange(3 << 20))
        opened = History.open(history)
        new = {facts.run for facts in opened.runs()} - ran
        ran |= new
        assert not any(opened.held(run) for run in ran)
        refs = opened.checkpoints()
        assert refs
        assert verify(opened, refs) == []
        assert {opened.state(run, step) for run in ran for step in opened.step_dirs(run)} <= {"committed", "incomplete"}
        for ref in refs[-2:]:
            state = capture.restore(str(ref), history=history)
            assert torch.isfinite(state["model"]["inner.weight"]).all()
    assert opened.reindex() == len(opened.checkpoints())
    for facts in opened.runs()[1:]:
        assert facts.parent_run is not None, "each start goes on from the one before"


@pytest.mark.guards("Resume is exact")
def test_a_resumed_child_goes_on_as_the_killed_one_would_have(history):
    kill_after(history, steps=4, bytes_more=100_000)
    opened = History.open(history)
    last = opened.resolve("latest")
    model, optimizer = make(256)
    capture.restore(str(last), history=history, model=model, optimizer=optimizer)
    assert_same(reference(model, optimizer), capture.restore(str(last), history=history))
    capture.enable(model, optimizer=optimizer, history=history, stats_every=0).close()
    assert dshistory.Explorer.open(history).runs()["state"].to_pylist() == ["cut off", "ended"]
