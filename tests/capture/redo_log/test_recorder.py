"""A training that a load counts back within its session, or puts back without counting: a redo log never makes a step
of one training from a checkpoint of the other.

No fingerprint tells of it here. The loop around the optimizer sets its count, as those of DeepSpeed do after a load;
`deepspeed_cases_redo_beside` has real ones.
"""

import copy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import capture
from capture.loops.pytorch.loop import count_from
from capture.redo_log import recorder, redo_log
from catalog.errors import MismatchError, NotFoundError
from catalog.format.redo_writer import RedoFileWriter
from catalog.history import History
from catalog.read.redo import recorded_steps
from catalog.verify import verify
from dshistory.explorer import Explorer

COUNTED_TWICE = r"after step \d+ .*: the step was made twice, since a load has counted the steps back"


class Training:
    """A training whose state of step 1 is loaded again, as that of a training with other weights."""

    def __init__(self, history: Path, *, begins: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 12)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.history = history
        count_from(self.optimizer, begins)
        kept = {"every": 4, "redo": True, "fingerprints": False, "stats_every": 0, **options}
        self.session = capture.enable(self.model, optimizer=self.optimizer, history=history, **kept)
        self.weights: dict[int, torch.Tensor] = {}

    def train(self, steps: int) -> dict[int, torch.Tensor]:
        """Make so many steps; return the weights after each."""
        made = {}
        for _ in range(steps):
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            made[self.session.step] = self.model.weight.detach().clone()
        return made

    def load(self, step: int | None) -> None:
        """Load other weights than those of any step; let the training count from `step`, or go on counting."""
        torch.manual_seed(100)
        other = torch.nn.Linear(8, 12)
        state = copy.deepcopy(self.optimizer.state_dict())
        self.model.load_state_dict(other.state_dict())
        self.optimizer.load_state_dict(state)
        if step is not None:
            count_from(self.optimizer, step)

    def assert_made(self, step: int, weights: torch.Tensor) -> None:
        assert torch.equal(capture.restore(step, history=self.history)["model"]["weight"], weights)


@pytest.fixture
def published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 0.0)


@pytest.mark.guards("A redo step has the bits of the training")
def test_no_step_of_the_first_time_is_made_from_a_checkpoint_of_the_second(tmp_path):
    training = Training(tmp_path)
    with training.session:
        first = training.train(6)
        training.load(1)
        again = training.train(4)
    assert list(again) == [2, 3, 4, 5]
    assert History.open(tmp_path).steps(training.session.run) == [0, 4, 5]
    for step in (1, 2, 3, 4):
        training.assert_made(step, first[step])
    training.assert_made(5, again[5])
    with pytest.raises(MismatchError, match=COUNTED_TWICE):
        capture.restore(6, history=tmp_path)
    assert verify(History.open(tmp_path)) == []


@pytest.mark.guards("A redo step has the bits of the training")
def test_a_checkpoint_of_the_second_time_breaks_the_steps_around_it_alone(tmp_path, published_at_once):
    """Whether it is there, or was removed again; the checkpoints of the first time stay what they are."""
    training = Training(tmp_path)
    with training.session as session:
        first = training.train(10)
        training.load(1)
        again = training.train(1)
        session.snapshot()
        again |= training.train(11)
    assert History.open(tmp_path).steps(session.run) == [0, 2, 4, 8, 12, 13]
    training.assert_made(1, first[1])
    training.assert_made(2, again[2])
    for step in (5, 7, 9, 10):
        training.assert_made(step, first[step])
    training.assert_made(12, again[12])
    training.assert_made(13, again[13])
    with pytest.raises(MismatchError, match=COUNTED_TWICE):
        capture.restore(3, history=tmp_path)
    with pytest.raises(MismatchError, match=r"after step 11 .*: the steps before it were counted twice"):
        capture.restore(11, history=tmp_path)
    Explorer.open(tmp_path).remove([2], force=True)
    with pytest.raises(MismatchError, match=COUNTED_TWICE):
        capture.restore(2, history=tmp_path)
    training.assert_made(1, first[1])


@pytest.mark.guards("A redo step has the bits of the training")
def test_a_session_that_begins_late_and_is_counted_back_at_once(tmp_path):
    """The checkpoint that it begins with is of the first time, all of its updates are of the second."""
    training = Training(tmp_path, begins=5)
    with training.session:
        training.load(1)
        again = training.train(6)
    assert History.open(tmp_path).steps(training.session.run) == [4, 5, 7]
    training.assert_made(4, again[4])
    training.assert_made(7, again[7])
    with pytest.raises(MismatchError, match=r"after step 6 .*: the steps before it were counted twice"):
        capture.restore(6, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
def test_steps_that_were_left_out_count_too(tmp_path, monkeypatch):
    """The checkpoint of one is of the first time, although the log has the step of the second time only."""
    real, release = RedoFileWriter.pack, redo_log.RedoLog.release
    go, is_free = threading.Event(), threading.Event()
    monkeypatch.setattr(recorder, "trains_on_all_cores", lambda *_, **__: False)
    monkeypatch.setattr(RedoFileWriter, "pack", lambda *args: go.wait() and real(*args))
    monkeypatch.setattr(redo_log.RedoLog, "release", lambda log, memory: (release(log, memory), is_free.set()))
    training = Training(tmp_path, on_full="skip")
    with training.session as session:
        first = training.train(4)
        is_free.clear()
        go.set()
        assert is_free.wait(60)
        training.load(2)
        training.train(4)
    assert recorded_steps(History.open(tmp_path).paths, session.run)[:2] == [1, 2]
    training.assert_made(4, first[4])
    with pytest.raises(MismatchError, match=r"after step 5 .*: the steps before it were counted twice"):
        capture.restore(5, history=tmp_path)


@pytest.mark.guards("A redo step has the bits of the training")
def test_a_load_that_does_not_count_back_breaks_the_step_after_it(tmp_path):
    training = Training(tmp_path)
    with training.session:
        first = training.train(6)
        training.load(None)
        again = training.train(4)
    assert list(again) == [7, 8, 9, 10]
    training.assert_made(6, first[6])
    with pytest.raises(MismatchError, match=r"after step 7 .*: load_state_dict"):
        capture.restore(7, history=tmp_path)
    for step in (8, 9, 10):
        training.assert_made(step, again[step])


@pytest.mark.guards("A redo step has the bits of the training")
def test_without_room_for_the_note_there_is_no_such_checkpoint(tmp_path, published_at_once):
    training = Training(tmp_path, strict=False)
    with training.session as session:
        training.train(3)
        training.load(1)
        folder = History.open(tmp_path).paths.redo_dir(session.run)
        while len(list(folder.glob("rank-*"))) < 3:
            pass
        folder.rename(folder.with_name("moved"))
        folder.write_text("no folder")
        with pytest.raises(OSError, match="redo"):
            session.snapshot()
        folder.unlink()
        folder.with_name("moved").rename(folder)
        session.snapshot()
        session.wait()
        assert History.open(tmp_path).steps(session.run) == [0, 1]
    with pytest.raises(MismatchError, match=COUNTED_TWICE):
        capture.restore(2, history=tmp_path)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from capture.redo_log import redo_log
from test_recorder import Training
redo_log._SEGMENT_S = 0.0
training = Training(Path({history!r}))
training.train(3)
training.load(1)
training.session.snapshot()
training.session.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.guards("A redo step has the bits of the training")
def test_a_kill_behind_a_checkpoint_of_the_second_time_leaves_what_says_so(tmp_path):
    script = KILLED.format(tests=str(Path(__file__).parent), history=str(tmp_path))
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    history = History.open(tmp_path)
    run = history.current_run()
    assert history.steps(run) == [0, 1]
    assert set(recorded_steps(history.paths, run)) >= {1, 2}
    with pytest.raises(MismatchError, match=COUNTED_TWICE):
        capture.restore(2, history=tmp_path)
    # Its own record may be gone with the process.
    with pytest.raises((MismatchError, NotFoundError)):
        capture.restore(3, history=tmp_path)
