"""A script that is asked to be a replay goes back, captures a child run and ends, with nothing of it rewritten."""

import os
import subprocess
import sys

import pytest

import dshistory
from capture.replays.change import Change
from capture.replays.request import VARIABLE, ReplayRequest, asked_replay
from catalog.errors import SetupError
from catalog.records import CheckpointRef

SCRIPT = """
import sys

import torch

import capture


class Batches:
    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        while True:
            self.position += 1
            yield torch.full((4, 6), self.position / 10)


torch.manual_seed(len(sys.argv))
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = Batches()
session = capture.enable(model, optimizer=optimizer, dataloader=loader, every=4, history=sys.argv[1], stats_every=0)
seen = []
for batch in loader:
    loss = (model(batch) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    session.log(loss=loss)
    seen.append(round(float(batch[0, 0]) * 10))
    print("step", session.step, "batches", *seen, flush=True)
    if session.step == 12:
        break
session.close()
print("the script came to its end")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "train.py", "history"], cwd=folder, check=True, capture_output=True)
    return folder


def command_line(folder, *words, status=0, verb="replay"):
    done = subprocess.run(
        [sys.executable, "-m", "dshistory", verb, "history", *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.slow
def test_a_script_is_replayed_unchanged_and_ended(script):
    done = command_line(script, "4", "--until", "8", "--", sys.executable, "train.py", "elsewhere", "another seed")
    assert "bit-identical up to step 8: 1 checkpoints" in done.stdout
    assert "step 8 batches 5 6 7 8\n" in done.stdout
    assert "step 9" not in done.stdout
    assert "came to its end" not in done.stdout
    assert not (script / "elsewhere").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_script_rebuilds_a_step(script):
    words = ["6", "--verify", "next", "--", sys.executable, "train.py", "elsewhere"]
    done = command_line(script, *words, verb="rebuild")
    assert "the fingerprints of 2 steps up to it agree" in " ".join(done.stdout.split())
    assert ":8 comes out of it bit for bit" in " ".join(done.stdout.split())
    h = dshistory.Explorer.open(script / "history")
    assert h.history.steps(h.history.runs()[-1].run) == [4, 6, 8]


@pytest.mark.slow
@pytest.mark.long
def test_batches_of_a_step_are_left_out(script):
    words = ["--skip-batches", "6", "--skip-batches", "8-9", "--change", "lr_scale=0.5", "--json"]
    done = command_line(script, "4", "--until", "9", *words, "--", sys.executable, "train.py", "h")
    assert "step 7 batches 5 7 10\n" in done.stdout
    h = dshistory.Explorer.open(script / "history")
    facts = h.history.runs()[-1]
    assert facts.facts["replay"]["change"] == {"lr_scale": 0.5, "skip_batches": [6, 8, 9]}
    assert facts.parent_step == 4


@pytest.mark.slow
def test_a_command_that_makes_no_replay_is_named(script):
    done = command_line(script, "4", "--", sys.executable, "-c", "raise SystemExit(3)", status=2)
    assert "ended with status 3 and made no replay: does it call capture.enable?" in done.stderr
    done = command_line(script, "4", "--", "no-such-program", status=2)
    assert "'no-such-program' can't be started" in done.stderr
    assert "needs STEP" in command_line(script, "--", "true", status=2).stderr


def test_a_request_passes_through_the_environment_once(monkeypatch, tmp_path):
    change = Change.of({"betas": [0.8, 0.9], "skip_batches": [3], "seed": 1, "reset_optimizer": True})
    request = ReplayRequest(
        id="x",
        history=tmp_path,
        ref=CheckpointRef("20260101-000000-abcdef", 2),
        until=7,
        change=change,
        capture_at=frozenset({4, 7}),
        batches_per_step=2,
    )
    monkeypatch.setenv(VARIABLE, request.to_environment())
    assert asked_replay() == request
    assert VARIABLE not in os.environ
    assert asked_replay() is None
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(SetupError, match="DSHISTORY_REPLAY holds no replay"):
        asked_replay()
