"""Compaction beside a training: the same bytes in less room, and nothing is lost however the session ends."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from capture_helpers import assert_same, make, one_step, reference
from catalog_helpers import Piece, Run
from packed_helpers import RUN, all_bytes, ref
from places import SUPPORT

import capture
from capture.maintenance import compaction
from capture.maintenance.compaction import Compaction
from catalog.access.pins import pinned
from catalog.disk.durable import temporary_path
from catalog.errors import SetupError
from catalog.history import History
from catalog.paths import data_file, packed_file
from catalog.verify import verify

PATIENCE_S = 300.0
AT_LOWEST_PRIORITY = compaction._START


@pytest.fixture(autouse=True)
def at_usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the lowest one a busy machine would never come to it."""
    changed = AT_LOWEST_PRIORITY.replace("beside.take_lowest_priority()\n", "")
    assert changed != AT_LOWEST_PRIORITY
    monkeypatch.setattr(compaction, "_START", changed)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def process_of(session: capture.Session) -> "subprocess.Popen[bytes]":
    until(lambda: session._committer._compaction._process)
    return session._committer._compaction._process


def forms(history: Path, run: str) -> dict[int, str]:
    """Return the form that each checkpoint's data file has on the disk."""
    found = {}
    for step in History.open(history).steps(run):
        data = history / data_file(run, step, 0)
        there = {"raw": data.exists(), "packed": (history / packed_file(data_file(run, step, 0))).exists()}
        found[step] = "+".join(name for name, is_there in there.items() if is_there)
    return found


@pytest.mark.guards("A packed checkpoint is the checkpoint")
@pytest.mark.parametrize("keep", [None, "last 4"])
def test_cold_checkpoints_are_packed_while_the_training_goes_on(history, keep):
    model, optimizer = make()
    states = {}
    options = {"every": 1, "stats_every": 0, "compact": True, "keep": keep}
    with capture.enable(model, optimizer=optimizer, history=history, **options) as session:
        for step in range(9):
            states[step] = reference(model, optimizer)
            if step in (4, 8):
                until(lambda step=step: forms(history, session.run)[step - 2] == "packed")
            one_step(model, optimizer)
            session.wait()
        stats = session.stats
    assert session.failures == []
    assert stats.compacted >= 2
    assert stats.saved_bytes > 0
    found = forms(history, session.run)
    assert found[8] == found[9] == "raw"
    assert (set(found) == set(range(10))) == (keep is None)
    assert sum(form == "packed" for form in found.values()) >= 2
    opened = History.open(history)
    assert verify(opened) == []
    events = opened.query("SELECT name FROM events WHERE name LIKE 'compaction%'")["name"].to_pylist()
    # What was to be the base may have been removed meanwhile, and that of the second trial too.
    assert set(events) <= ({"compaction_left"} if keep else set())
    for step in set(found) - {9}:
        assert_same(capture.restore(f"{session.run}:{step}", history=history), states[step])


def numbers(step: int, rank: int) -> list[Piece]:
    data = np.arange(4000, dtype=np.uint32) * 3 + step * (rank + 1)
    return [Piece(f"weight.{rank}", data.tobytes(), dtype="F32")]


def test_the_first_rank_packs_the_parts_of_all_once_they_are_committed(tmp_path):
    with Run(tmp_path / "h", world_size=2) as run:
        history = History.open(run.root)
        ours = Compaction(run.writers[0], removing=threading.Lock(), wait_idle=lambda seconds: None)
        for step in range(0, 40, 10):
            run.checkpoint(step, numbers(step, 0), numbers(step, 1))
            ours.published(step)
        before = all_bytes(history)
        run.part(40, 0, numbers(40, 0))
        ours.published(40)
        until(lambda: ours.figures[0] == 2)
        with pinned(history.paths, ref(20)):
            run.part(40, 1, numbers(40, 1))
            assert run.writers[1].try_commit(40)
            run.checkpoint(50, numbers(50, 0), numbers(50, 1))
            ours.published(50)
            until(lambda: ours.figures[0] == 3)
            assert forms(run.root, RUN)[20] == "raw"
        until(lambda: ours.figures[0] == 4)
        ours.close()
    assert forms(run.root, RUN) == dict.fromkeys(range(0, 40, 10), "packed") | {40: "raw", 50: "raw"}
    assert {key: data for key, data in all_bytes(history).items() if key[0] < 40} == before
    assert verify(history) == []


def test_close_ends_it_at_once_and_leaves_nothing_half_done(history):
    model, optimizer = make()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, compact=True)
    for _ in range(4):
        one_step(model, optimizer)
        session.wait()
    process = process_of(session)
    process.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split(") ")[1][0] == "T")
    under_way = int(session.stats.compacted)
    image = history / packed_file(data_file(session.run, under_way, 0))
    temporary_path(image).write_bytes(b"half")
    session.close()
    assert process.returncode == -signal.SIGKILL
    assert list(history.rglob("*.tmp")) == []
    found = forms(history, session.run)
    assert "raw+packed" not in found.values()
    assert [form for step, form in found.items() if step >= under_way] == ["raw"] * (5 - under_way)
    assert verify(History.open(history)) == []


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from capture_helpers import make, one_step
import capture
model, optimizer = make(256)
session = capture.enable(model, optimizer=optimizer, every=1, history={history!r}, stats_every=0, compact=True)
while session.stats.compacted < 2:
    one_step(model, optimizer)
    session.wait()
print(session._committer._compaction._process.pid, flush=True)
while True:
    one_step(model, optimizer)
"""


@pytest.mark.slow
@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_it_ends_with_a_training_that_is_killed_and_nothing_is_lost(history):
    script = SCRIPT.format(tests=str(SUPPORT), history=str(history))
    training = subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    pid = int(training.stdout.readline())
    training.kill()
    training.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(") ")[1])
    opened = History.open(history)
    assert verify(opened) == []
    (run,) = [facts.run for facts in opened.runs()]
    assert list(forms(history, run).values()).count("packed") >= 2


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no memory')", "no memory"),
        (
            """input(); print('{"step": 99, "damaged": []}', flush=True); input()""",
            "was asked for {'pack': 0}, and answered",
        ),
    ],
)
def test_a_process_that_fails_costs_the_compaction_alone(history, monkeypatch, caplog, program, said):
    monkeypatch.setattr(compaction, "_START", program)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, compact=True) as session:
        for _ in range(5):
            one_step(model, optimizer)
            session.wait()
        until(lambda: session._committer._compaction._thread.has_ended)
    assert session.failures == []
    assert said in caplog.text
    assert set(forms(history, session.run).values()) == {"raw"}
    events = History.open(history).query("SELECT name FROM events WHERE name = 'compaction_failed'")
    assert events.num_rows == 1


def test_it_has_the_lowest_priority(history, monkeypatch):
    monkeypatch.setattr(compaction, "_START", AT_LOWEST_PRIORITY)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0, compact=True) as session:
        for _ in range(3):
            one_step(model, optimizer)
            session.wait()
        pid = process_of(session).pid
        until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


@pytest.fixture
def beside(tmp_path):
    """Yield a run with five checkpoints, and its compaction, which knows of none yet."""
    with Run(tmp_path / "h") as run:
        for step in range(0, 50, 10):
            run.checkpoint(step, numbers(step, 0))
        ours = Compaction(run.writers[0], removing=threading.Lock(), wait_idle=lambda seconds: None)
        yield run, ours
        ours.close()
    assert verify(History.open(run.root)) == []


def all_published(ours: Compaction) -> None:
    for step in range(0, 50, 10):
        ours.published(step)


def test_a_reader_that_comes_while_a_checkpoint_is_packed_is_waited_for(beside, monkeypatch):
    run, ours = beside
    drop, came = compaction.drop_data_files, []

    def while_read(paths, ref, files):
        came.append(ref.step)
        if came.count(ref.step) > 3:
            return drop(paths, ref, files)
        with pinned(paths, ref):
            return drop(paths, ref, files)

    monkeypatch.setattr(compaction, "drop_data_files", while_read)
    all_published(ours)
    until(lambda: ours.figures[0] == 3)
    assert came.count(0) == 4
    assert forms(run.root, RUN) == dict.fromkeys((0, 10, 20), "packed") | {30: "raw", 40: "raw"}


def test_it_waits_for_room_and_for_a_disk_that_does_not_answer(beside, monkeypatch):
    _, ours = beside
    looks = []

    def statvfs(path):
        looks.append(path)
        if len(looks) == 1:
            raise OSError(5, "Input/output error")
        found = statvfs_of(path)
        return os.statvfs_result((*found[:4], 0 if len(looks) < 10 else found[4], *found[5:]))

    def of_a_bad_disk(paths, ref):
        if len(looks) < 3:
            looks.append(paths)
            raise OSError(5, "Input/output error")
        return is_pinned(paths, ref)

    statvfs_of, is_pinned = os.statvfs, compaction.is_pinned
    monkeypatch.setattr(compaction, "_LOOK_S", 0.05)
    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(compaction, "is_pinned", of_a_bad_disk)
    all_published(ours)
    until(lambda: ours.figures[0] == 3)
    assert len(looks) >= 10


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_a_disk_that_is_full_while_a_checkpoint_is_packed_is_waited_for_and_said_once(beside, monkeypatch, code):
    """It is no try of the checkpoint, and a quota that is used up looks like a disk with much room."""
    run, ours = beside
    failing = f"""
import errno, os
write, times = os.fsync, []
def full(descriptor):
    times.append(descriptor)
    if len(times) <= 5:
        raise OSError(errno.{code}, os.strerror(errno.{code}))
    write(descriptor)
os.fsync = full
beside.main("""
    monkeypatch.setattr(compaction, "_START", compaction._START.replace("\nbeside.main(", failing))
    monkeypatch.setattr(compaction, "_FULL_PAUSE_S", 0.05)
    monkeypatch.setattr(compaction, "_LOOK_S", 0.05)
    all_published(ours)
    until(lambda: ours.figures[0] == 3)
    assert forms(run.root, RUN) == dict.fromkeys((0, 10, 20), "packed") | {30: "raw", 40: "raw"}
    run.writers[0].journal.flush()
    told = History.open(run.root).query("SELECT step, name, detail->>'reason' AS reason FROM events").to_pylist()
    (said,) = (row for row in told if row["name"].startswith("compaction"))
    assert (said["step"], said["name"]) == (0, "compaction_waits")
    assert said["reason"].startswith(str(run.root))
    assert os.strerror(getattr(errno, code)) in said["reason"]


def test_what_ails_one_checkpoint_leaves_that_one_alone(beside, monkeypatch):
    run, ours = beside
    failing = """
from catalog.compaction.key_frames import KeyFrames
pack = KeyFrames.pack
def fail(frames, step, **options):
    if step == 10:
        raise MemoryError("none is left")
    return pack(frames, step, **options)
KeyFrames.pack = fail
print("much" * 100_000, file=sys.stderr)
beside.main("""
    monkeypatch.setattr(compaction, "_START", compaction._START.replace("\nbeside.main(", failing))
    all_published(ours)
    until(lambda: forms(run.root, RUN)[20] == "packed")
    assert forms(run.root, RUN)[10] == "raw"


def test_a_thread_that_can_not_begin_costs_the_compaction_alone(beside, monkeypatch, caplog):
    _, ours = beside

    def none_left(*args, **options):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compaction, "BackgroundThread", none_left)
    ours.published(0)
    ours.published(10)
    assert caplog.text.count("are not compacted any more: can't start new thread") == 1


def test_a_log_that_fails_costs_no_snapshot(beside, monkeypatch):
    run, ours = beside

    class Failing(logging.Handler):
        def emit(self, record):
            raise OSError(28, "No space left on device")

    def none_left(*args, **options):
        raise RuntimeError("can't start new thread")

    handler = Failing()
    monkeypatch.setattr(compaction, "BackgroundThread", none_left)
    compaction._log.addHandler(handler)
    try:
        ours.published(0)
    finally:
        compaction._log.removeHandler(handler)
    run.writers[0].journal.flush()
    told = History.open(run.root).query("SELECT detail->>'reason' AS reason FROM events").to_pylist()
    assert told == [{"reason": "can't start new thread"}]


@pytest.mark.parametrize(("name", "value"), [("executable", ""), ("frozen", True)])
def test_a_program_without_a_python_is_refused(history, monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value, raising=False)
    model, optimizer = make()
    with pytest.raises(SetupError, match=r"compact=True: sys\.executable is"):
        capture.enable(model, optimizer=optimizer, history=history, compact=True)
