"""A run's writer is measured once per file system, kept unless clearly beaten, and named in the run's facts."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from capture_helpers import MIB, committed_steps, make, one_step
from places import SUPPORT

import capture
import native
from capture.snapshot import writer_choice, writer_tuning
from catalog.errors import SetupError
from catalog.history import History

IO_URING = native.probe_io_uring() == ""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of measurements is empty, and measuring may take any time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(writer_tuning, "MOST_S", 600.0)
    return tmp_path / "cache" / "dshistory" / "writer.json"


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning has been issued in this process yet."""
    monkeypatch.setattr(writer_choice, "_warned", set())


def settings(folder: Path) -> writer_tuning.Settings:
    return writer_tuning.settings_for(folder, backend="posix", align=4096)


def test_measured_once_and_remembered(tmp_path, memory):
    first = settings(tmp_path)
    assert first.origin == "measured"
    assert {(trial.block_bytes, trial.depth) for trial in first.trials} == set(writer_tuning.CANDIDATES)
    assert all(trial.bytes_per_s > 0 for trial in first.trials)
    again = settings(tmp_path)
    assert again.origin == "remembered"
    assert again.trials == first.trials
    assert (again.block_bytes, again.depth) == (first.block_bytes, first.depth)
    assert not list(tmp_path.glob(".dshistory-tuning-*"))


def test_remembered_settings_are_used_and_named_in_the_facts(tmp_path, memory):
    settings(tmp_path)
    document = json.loads(memory.read_text())
    (key,) = document["file_systems"]
    document["file_systems"][key] |= {"block_bytes": MIB, "depth": 32}
    memory.write_text(json.dumps(document))
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=tmp_path / "history", backend="posix") as session:
        one_step(model, optimizer)
    facts = History.open(tmp_path / "history").run_facts(session.run).facts
    assert (facts["block_bytes"], facts["depth"], facts["settings"]) == (MIB, 32, "remembered")


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        '{"version": 1}',
        '{"version": 9, "file_systems": {}}',
        '{"version": 1, "file_systems": {"KEY": 5}}',
        "[]",
    ],
)
def test_a_damaged_memory_is_measured_and_written_anew(tmp_path, memory, damage):
    settings(tmp_path)
    (key,) = json.loads(memory.read_text())["file_systems"]
    memory.write_text(damage.replace("KEY", key))
    assert settings(tmp_path).origin == "measured"
    assert settings(tmp_path).origin == "remembered"


def test_settings_that_were_never_offered_are_ignored(tmp_path, memory):
    settings(tmp_path)
    document = json.loads(memory.read_text())
    (key,) = document["file_systems"]
    document["file_systems"][key]["block_bytes"] = 123
    memory.write_text(json.dumps(document))
    assert settings(tmp_path).origin == "measured"


def test_a_memory_that_cannot_be_written_is_warned_about(tmp_path, memory, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "can't be remembered" in settings(tmp_path).origin


def test_noise_chooses_nothing(tmp_path, memory, monkeypatch):
    rates = iter([1.0, 1.05, 1.24, 0.5, 1.0, 1.0])
    trials = tuple(writer_tuning.Trial(*candidate, next(rates)) for candidate in writer_tuning.CANDIDATES)
    monkeypatch.setattr(writer_tuning, "_trials", lambda *_, **__: trials)
    assert (settings(tmp_path).block_bytes, settings(tmp_path).depth) == writer_tuning.CANDIDATES[0]


def test_a_clear_winner_is_chosen(tmp_path, memory, monkeypatch):
    rates = iter([1.0, 1.05, 1.3, 0.5, 1.0, 1.0])
    trials = tuple(writer_tuning.Trial(*candidate, next(rates)) for candidate in writer_tuning.CANDIDATES)
    monkeypatch.setattr(writer_tuning, "_trials", lambda *_, **__: trials)
    assert (settings(tmp_path).block_bytes, settings(tmp_path).depth) == writer_tuning.CANDIDATES[2]


def test_a_slow_disk_keeps_the_first_candidate(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(writer_tuning, "MOST_S", 0.0)
    chosen = settings(tmp_path)
    assert "too slow" in chosen.origin
    assert (chosen.block_bytes, chosen.depth) == writer_tuning.CANDIDATES[0]
    assert settings(tmp_path).origin == "remembered"


def test_a_small_budget_gets_small_blocks(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, budget_bytes=2 * MIB) as session:
        one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1]
    assert History.open(history).run_facts(session.run).facts["block_bytes"] < MIB


def test_a_budget_below_one_block_is_refused_with_the_least_budget(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match=r"budget_bytes=4096 .* give at least \d+"):
        capture.enable(model, optimizer=optimizer, history=history, budget_bytes=4096)


def test_a_budget_beyond_any_memory_is_refused_by_its_value(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match=r"budget_bytes=\d{22}: give a whole number of bytes"):
        capture.enable(model, optimizer=optimizer, history=history, budget_bytes=2**70)


def test_a_file_system_without_o_direct_is_warned_about_once_and_works(history, talkative, monkeypatch):
    """The test simulates the missing O_DIRECT: since Linux 6.6 even tmpfs accepts it."""
    probe = native.probe_file_system
    monkeypatch.setattr(
        native, "probe_file_system", lambda folder: {**probe(folder), "direct": False, "reason": "refused by a test"}
    )
    model, optimizer = make()
    with pytest.warns(
        UserWarning, match=r"through the page cache, since .* without O_DIRECT: refused by a test"
    ) as said:
        capture.enable(model, optimizer=optimizer, every=1, history=history).close()
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = capture.enable(model, optimizer=optimizer, every=1, history=history)
    one_step(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 1]
    facts = History.open(history).run_facts(session.run).facts
    assert any("page cache" in notice for notice in facts["writer_notices"])


LOCKED = """
import resource, sys, warnings
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
sys.path.insert(0, {tests!r})
from capture_helpers import make, one_step
import capture
model, optimizer = make()
with capture.enable(model, optimizer=optimizer, every=1, history={history!r}, backend="io_uring") as session:
    one_step(model, optimizer)
assert not session._writer.registered
"""


@pytest.mark.slow
@pytest.mark.skipif(not IO_URING, reason="io_uring does not work here")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to give up the right to lock memory")
def test_a_low_limit_of_locked_memory_is_warned_about_and_works(history):
    script = textwrap.dedent(LOCKED).format(tests=str(SUPPORT), history=str(history))
    command = [sys.executable, "-c", script]
    if os.getuid() == 0:
        command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_MEMLOCK, 65536 bytes" in done.stderr
    opened = History.open(history)
    facts = opened.run_facts(opened.current_run()).facts
    assert facts["staging_registered"] is False
    assert committed_steps(history, opened.current_run()) == [0, 1]


def test_missing_io_uring_is_warned_about_and_posix_works(history, talkative, monkeypatch):
    monkeypatch.setattr(writer_choice, "probe_io_uring", lambda: "forbidden by a test")
    model, optimizer = make()
    with (
        pytest.warns(UserWarning, match="POSIX threads, since io_uring is not available here: forbidden by a test"),
        capture.enable(model, optimizer=optimizer, every=1, history=history) as session,
    ):
        one_step(model, optimizer)
    assert History.open(history).run_facts(session.run).facts["backend"] == "posix"
