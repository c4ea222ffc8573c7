"""A training in a cell of a notebook: its kernel is interrupted and restarted while snapshots are being written.

Nothing hangs, what was committed stays, and the next kernel goes on with the same history.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_helpers import committed_steps
from jupyter_client.manager import KernelManager, start_new_kernel
from places import SUPPORT

from catalog.history import History
from catalog.verify import verify

pytestmark = pytest.mark.slow

PATIENCE_S = 120

TRAINING = f"""
import sys; sys.path.insert(0, {str(SUPPORT)!r})
import capture, native
from capture_helpers import MIB, make, one_step
from faulty_writer import faults_in_new_writers
model, optimizer = make(512)

def enable(*, delay_us):
    faults = native.Faults(delay_us=delay_us)
    options = dict(every=1, history="history", backend="posix", budget_bytes=2 * MIB, stats_every=0, resume="auto")
    with faults_in_new_writers(faults):
        return capture.enable(model, optimizer=optimizer, **options)
"""
"""A snapshot takes about two seconds with a delay of 200 ms for each write."""
SLOW = "session = enable(delay_us=200_000)"
ONWARD = "one_step(model, optimizer)\nprint('step', flush=True)\n"


class Kernel:
    """A kernel in the folder of the history, and the notebook in front of it."""

    def __init__(self, folder: Path) -> None:
        self.history = folder / "history"
        self.manager: KernelManager
        self.manager, self._client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def run(self, code: str, *, until: str | None = None) -> tuple[str, str | None]:
        """Execute a cell; return what it prints and the name of the exception that ends it, or, as soon as it has
        printed the line `until`, what it has printed so far.
        """
        sent = self._client.execute(code)
        return self.listen(sent, until=until)

    def listen(self, sent: str, *, until: str | None = None) -> tuple[str, str | None]:
        printed, raised = "", None
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
                if until is not None and until in printed.splitlines():
                    return printed, None
            elif message["msg_type"] == "error":
                raised = content["ename"]
            elif content.get("execution_state") == "idle":
                return printed, raised

    def interrupt_in(self, code: str) -> str | None:
        """Execute a cell, interrupt it after its first line, and return the name of the exception that ends it."""
        sent = self._client.execute(code)
        self.listen(sent, until="step")
        self.manager.interrupt_kernel()
        return self.listen(sent)[1]

    def restart(self, *, now: bool) -> None:
        self.manager.restart_kernel(now=now)
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def end(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    kernel = Kernel(tmp_path)
    try:
        yield kernel
    finally:
        kernel.end()


def runs_of(root: Path) -> list[str]:
    return [facts.run for facts in History.open(root).runs()]


def assert_whole(root: Path) -> dict[str, list[int]]:
    """Return the committed steps of each run; every byte of them has its checksum."""
    assert verify(History.open(root)) == []
    return {run: committed_steps(root, run) for run in runs_of(root)}


def go_on(kernel: Kernel, committed: int) -> None:
    """A new session in the restarted kernel resumes from the newest committed step, and captures the next."""
    printed, raised = kernel.run(
        TRAINING
        + "session = enable(delay_us=0)\n"
        + "one_step(model, optimizer)\nsession.close()\nprint(session.failures)"
    )
    assert raised is None
    assert printed.splitlines()[-1] == "[]"
    steps = [step for of_run in assert_whole(kernel.history).values() for step in of_run]
    assert max(steps) == committed + 1


@pytest.mark.guards("The process keeps its life")
def test_a_kernel_that_is_killed_and_restarted_with_snapshots_pending(kernel: Kernel) -> None:
    kernel.run(TRAINING)
    kernel.run("session = enable(delay_us=0)\nsession.wait()\nsession.close()\n" + SLOW)
    kernel.run(ONWARD)
    pending, _ = kernel.run("print(session._committer.pending() > 0)")
    assert pending == "True\n"
    kernel.restart(now=True)
    steps = [step for of_run in assert_whole(kernel.history).values() for step in of_run]
    assert 0 in steps
    go_on(kernel, max(steps))


@pytest.mark.guards("The process keeps its life")
def test_a_cell_that_is_interrupted_while_snapshots_are_written(kernel: Kernel) -> None:
    """The same session goes on in the next cell, and the kernel can be shut down and restarted then."""
    kernel.run(TRAINING)
    kernel.run(SLOW)
    raised = kernel.interrupt_in("while True:\n    one_step(model, optimizer)\n    print('step', flush=True)")
    assert raised == "KeyboardInterrupt"
    printed, raised = kernel.run("session.wait()\nprint(session.failures)")
    assert (printed, raised) == ("[]\n", None)
    before = assert_whole(kernel.history)
    assert max(before[runs_of(kernel.history)[-1]]) >= 1
    kernel.run(ONWARD)
    kernel.restart(now=False)
    after = assert_whole(kernel.history)
    assert all(set(steps) <= set(after[run]) for run, steps in before.items())
    go_on(kernel, max(max(steps) for steps in after.values()))
