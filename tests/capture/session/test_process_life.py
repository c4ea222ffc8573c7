"""Signals and the ends of processes: whoever waits can leave at once, nothing hangs, and the history stays whole."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from capture_helpers import committed_steps
from places import SUPPORT

import capture
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.verify import verify

SLOW_S = 0.25
PATIENCE_S = 180

SETTING = """
import os, signal, sys, threading, time; sys.path.insert(0, {support!r})
from capture_helpers import MIB, faulty_session, make, one_step
import capture, native
model, optimizer = make(512)
faults = native.Faults(delay_us={delay_us})
root, options = {history!r}, dict(faults=faults, budget_bytes=2 * MIB, stats_every=0)

def say(*words):
    print(*words, flush=True)

def pending():
    return session._committer.pending()

def functions():
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back

def interrupt_in(function):
    def watch():
        while function not in functions():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=watch, daemon=True).start()
"""


class Child:
    """A training in a process of its own that talks through lines."""

    def __init__(self, history: Path, body: str, *, delay_s: float = SLOW_S) -> None:
        text = SETTING.format(support=str(SUPPORT), history=str(history), delay_us=int(delay_s * 1_000_000)) + body
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hear(self, expected: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == expected, line or self.process.communicate()[1]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Return the exit code and stderr of a process that ends by itself."""
        self.output, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


@pytest.fixture
def start(history):
    children: list[Child] = []

    def begin(body: str, **options: float) -> Child:
        children.append(Child(history, body, **options))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.communicate()


def only_run(history: Path) -> str:
    (facts,) = History.open(history).runs()
    return facts.run


INTERRUPTED_PROVIDER = """
class Slow:
    reads = 0

    def state_dict(self):
        self.reads += 1
        if self.reads in {numbers}:
            signal.raise_signal(signal.SIGINT)
        return {{"reads": 1}}

    def load_state_dict(self, state):
        pass

session = capture.enable(
    model, optimizer=optimizer, every=2, history=root, stats_every=0, redo=True,
    providers=[capture.Stateful("slow", Slow())],
)
heard = 0
while session.step < 9:
    try:
        one_step(model, optimizer)
    except KeyboardInterrupt:
        heard += 1
session.close()
say("closed after", heard, "of", session.failures)
"""


@pytest.mark.guards("The process keeps its life")
@pytest.mark.parametrize("number", range(3, 7))
def test_ctrl_c_while_a_provider_is_read_drops_nothing(history, start, number):
    """The first two reads are those of `enable`; the others are at a step, or at the next forward. Two interrupts in a
    row: memory of a step that was lost would be missed by the next one but one."""
    child = start(INTERRUPTED_PROVIDER.format(numbers={number, number + 1}))
    code, errors = child.end()
    assert code == 0, errors
    assert child.output.strip() == "closed after 2 of []"
    h = History.open(history)
    assert committed_steps(history, only_run(history)) == [0, 2, 4, 6, 8, 9]
    assert recorded_steps(h.paths, only_run(history)) == list(range(1, 10))
    assert verify(h) == []
    for step in range(10):
        assert capture.restore(step, history=history)["model"]


INTERRUPTED = """
session = faulty_session(model, optimizer, root, **options)
session.wait()
one_step(model, optimizer)
interrupt_in("Snapshot.release")
try:
    one_step(model, optimizer)
except KeyboardInterrupt:
    say("left the barrier", "after" if session._events.current._unreleased.job.released() else "before", "its end")
optimizer.step()
interrupt_in("BackgroundThread.wait")
for _ in range(2):
    try:
        session.close()
        say("closed with", pending())
    except KeyboardInterrupt:
        say("left close with some pending" if pending() else "left close too late")
"""


@pytest.mark.guards("The process keeps its life")
def test_ctrl_c_leaves_the_barrier_and_close_and_drops_nothing(history, start: Callable[..., Child]):
    """The update that was interrupted has not run; the next one waits again, and so does the next `close`."""
    child = start(INTERRUPTED, delay_s=2 * SLOW_S)
    child.hear("left the barrier before its end")
    child.hear("left close with some pending")
    child.hear("closed with 0")
    assert child.end() == (0, "")
    assert committed_steps(history, only_run(history)) == [0, 1, 2]
    assert verify(History.open(history)) == []


LEFT = """
# All of it is staged at once, so that what is left when `close` begins to wait is one long write.
model, optimizer = make(64)
session = faulty_session(model, optimizer, root, **options)
session.wait()
one_step(model, optimizer)
interrupt_in("BackgroundThread.wait")
try:
    session.close()
except KeyboardInterrupt:
    say("left close with some pending" if pending() else "left close too late")
"""


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
def test_a_process_that_has_left_close_does_not_wait_at_its_exit(history, start: Callable[..., Child]):
    child = start(LEFT, delay_s=1.5)
    child.hear("left close with some pending")
    code, errors = child.end()
    assert code == 0
    assert "step 1 was given up" in errors
    assert committed_steps(history, only_run(history)) == [0]
    assert verify(History.open(history)) == []


TERMINATED = """
session = faulty_session(model, optimizer, root, **options, every=1000, sigterm_limit_s={limit_s})
session.wait()
for step in range(1, 4):
    one_step(model, optimizer)
def terminate(*_):
    if not said:
        said.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
said = []
optimizer.register_step_pre_hook(terminate)
one_step(model, optimizer)
while True:
    time.sleep(0.01)
"""


@pytest.mark.guards("The process keeps its life")
@pytest.mark.parametrize("limit_s", [60, pytest.param(0.1, marks=pytest.mark.slow)])
def test_sigterm_takes_the_step_whose_update_is_under_way(history, start: Callable[..., Child], limit_s):
    """The process ends by SIGTERM, as without a session; a step that takes longer than the limit is left out."""
    child = start(TERMINATED.format(limit_s=limit_s), delay_s=0.4 if limit_s < 1 else 0)
    code, errors = child.end()
    assert code == -signal.SIGTERM, errors
    assert committed_steps(history, only_run(history)) == ([0, 4] if limit_s > 1 else [0])
    assert verify(History.open(history)) == []


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
def test_sigterm_leaves_the_redo_log_whole(history, start: Callable[..., Child]):
    child = start(
        "session = faulty_session(model, optimizer, root, **options, every=1000, redo=True, sigterm_limit_s=60)\n"
        "for _ in range(5):\n"
        "    one_step(model, optimizer)\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n",
        delay_s=0.0,
    )
    code, errors = child.end()
    assert code == -signal.SIGTERM, errors
    run = only_run(history)
    assert committed_steps(history, run) == [0, 5]
    assert recorded_steps(History.open(history).paths, run) == [1, 2, 3, 4, 5]


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
def test_sigterm_runs_the_former_handler_after_the_last_snapshot(history, start: Callable[..., Child]):
    script = TERMINATED.format(limit_s=60).replace(
        "session =", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nsession =", 1
    )
    code, errors = start(script, delay_s=0).end()
    assert (code, errors) == (7, "")
    assert committed_steps(history, only_run(history)) == [0, 4]


PENDING = """
session = faulty_session(model, optimizer, root, **options)
session.wait()
one_step(model, optimizer)
one_step(model, optimizer)
{end}
"""


# How the process ends, its exit code, and the committed steps where these are certain.
ENDS: dict[str, tuple[int, list[int] | None]] = {
    "": (0, [0, 1, 2]),
    "sys.exit(3)": (3, [0, 1, 2]),
    "raise RuntimeError('broken')": (1, [0, 1, 2]),
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)": (-signal.SIGINT, [0, 1, 2]),
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)": (-signal.SIGTERM, None),
    "os._exit(4)": (4, None),
    "child = os.fork(); os.waitpid(child, 0) if child else sys.exit(0)": (0, [0, 1, 2]),
}


@pytest.fixture(scope="module")
def pending(tmp_path_factory) -> Iterator[dict[str, tuple[Path, Child]]]:
    """All these processes at once, each with its history: most of the time they wait for their slow disks."""
    folder = tmp_path_factory.mktemp("pending")
    roots = {end: folder / f"history-{number}" for number, end in enumerate(ENDS)}
    children = {end: (root, Child(root, PENDING.format(end=end))) for end, root in roots.items()}
    yield children
    for _, child in children.values():
        child.process.kill()
        child.process.communicate()


@pytest.mark.guards("The process keeps its life")
@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_process_with_pending_snapshots_ends(pending: dict[str, tuple[Path, Child]], end: str):
    """Snapshots are finished wherever Python ends by itself; elsewhere the history is that of the last commit."""
    code, committed = ENDS[end]
    history, child = pending[end]
    ended, errors = child.end()
    assert ended == code, errors
    steps = committed_steps(history, only_run(history))
    assert steps == committed if committed is not None else steps[0] == 0
    assert verify(History.open(history)) == []


BUSY = """
import atexit, sys, threading
import torch
import capture
from capture.publishing import statistics_thread
atexit.register(lambda: print([one.name for one in threading.enumerate() if one.name == "dshistory-statistics"]))
statistics_thread._CLOSE_PATIENCE_S = 0.0
model = torch.nn.Linear(4000, 4000, bias=False)
model.weight.grad = torch.ones_like(model.weight)
optimizer = torch.optim.SGD(model.parameters())
session = capture.enable(model, optimizer=optimizer, every=1, history=sys.argv[1])
optimizer.step()
session.wait()
session.close()
"""


@pytest.mark.guards("The process keeps its life")
def test_a_process_ends_well_while_statistics_are_being_computed(history):
    done = subprocess.run([sys.executable, "-c", BUSY, history], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


BUFFERS = """
class Slow:
    armed = False

    def state_dict(self):
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGINT)
        return {}

    def load_state_dict(self, state):
        pass

slow = Slow()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
optimizer = torch.optim.AdamW(model.parameters())
providers = [capture.Stateful("slow", slow, read_at="step")]
session = capture.enable(model, optimizer=optimizer, history=root, providers=providers, **more)
for step in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    slow.armed = step == 2
    try:
        optimizer.step()
    except KeyboardInterrupt:
        say("left step", session.step)
at_the_step = model[1].running_mean.clone()
model(torch.randn(4, 8))
session.close()
say("buffers", torch.equal(capture.restore(3, history=root)["buffer"]["1.running_mean"], at_the_step), session.failures)
"""


@pytest.mark.guards("The process keeps its life")
@pytest.mark.parametrize("every", [1, 50], ids=["captured", "kept"])
def test_a_step_that_ctrl_c_has_ended_has_its_buffers_and_not_those_of_the_next_forward(history, start, every):
    child = start(f"import torch; more = dict(every={every}, stats_every=0)\n{BUFFERS}")
    code, errors = child.end()
    assert code == 0, errors
    assert child.output.splitlines() == ["left step 3", "buffers True []"]
