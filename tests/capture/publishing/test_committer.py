"""The journal of a session has few files, and a checkpoint that is seen has its metrics."""

import datetime
import queue
import threading

import torch
from capture_helpers import make, one_step
from late_marks import LateMarks

import capture
from capture.publishing import registration
from capture.publishing.committer import Committer
from catalog.format.segments import segments
from catalog.history import History
from catalog.index import index
from catalog.index.database import database
from catalog.paths import HistoryPaths
from catalog.records import RunFacts
from catalog.run_writer import RunWriter, create_history, create_run, new_run_id


def tell_of_registrations(monkeypatch, tell):
    """Call `tell` after each registration with the number of checkpoints that it has found."""
    real = index.register

    def register_and_tell(paths, **patience):
        count = real(paths, **patience)
        tell(count)
        return count

    monkeypatch.setattr(index, "register", register_and_tell)


def test_commits_leave_few_journal_files_while_the_run_goes_on_and_one_at_its_end(history):
    model, optimizer = make()
    most = 0
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        folder = History.open(history).paths.journal_dir(session.run)
        for step in range(1, 9):
            loss = one_step(model, optimizer)
            session.log(loss=loss)
            session.wait()
            most = max(most, len(list(segments(folder))))
            # A reader that sees a checkpoint sees its metrics, too.
            query = "SELECT max(step) AS step FROM metrics JOIN checkpoints USING (run, step) WHERE name = 'lr'"
            (row,) = History.open(history).query(query).to_pylist()
            assert row["step"] == step
    assert 1 < most <= 9
    assert len(list(segments(folder))) == 1
    rows = History.open(history).query("SELECT count(*) AS n FROM metrics WHERE name = 'loss'").to_pylist()
    assert rows == [{"n": 8}]


def test_the_index_takes_its_share_of_the_time_and_has_everything_at_the_end(history, monkeypatch):
    """Queries see what is not registered, so many checkpoints may wait for one registration."""
    registered = []
    tell_of_registrations(monkeypatch, registered.append)
    monkeypatch.setattr(registration, "_SHARE", 1e-9)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        for step in range(1, 9):
            one_step(model, optimizer)
            session.wait()
            assert len(History.open(history).checkpoints()) == step + 1
    assert len(registered) == 2
    assert sum(registered) == 9


def test_the_index_keeps_up_with_steps_that_are_captured_many_times_a_second(history, monkeypatch):
    """Many that wait are registered although the index has had its share: each reader would read them by itself."""
    registered = []
    tell_of_registrations(monkeypatch, registered.append)
    monkeypatch.setattr(registration, "_SHARE", 1e-9)
    monkeypatch.setattr(registration, "_MANY", 4)
    monkeypatch.setattr(registration, "_SHARE_OF_MANY", 1e9)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        for _ in range(8):
            one_step(model, optimizer)
            session.wait()
    assert registered == [1, 4, 4]


def test_a_checkpoint_is_registered_in_its_turn_although_no_other_one_follows(history, monkeypatch):
    monkeypatch.setattr(registration, "_SHARE", 0.5)
    two = threading.Barrier(2)
    real = index.register
    tell_of_registrations(monkeypatch, lambda count: two.wait(60))
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        session.wait()
        two.wait(60)
        one_step(model, optimizer)
        session.wait()
        two.wait(60)
        monkeypatch.setattr(index, "register", real)


def test_what_found_the_index_busy_is_registered_at_the_end(history, monkeypatch):
    monkeypatch.setattr(registration, "_SHARE", 1e9)
    registered = queue.Queue()
    tell_of_registrations(monkeypatch, registered.put)
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        session.wait()
        assert registered.get(timeout=60) == 1
        with database(HistoryPaths(history)).reading(patience_s=10):
            one_step(model, optimizer)
            session.wait()
            assert registered.get(timeout=60) == 0
    assert registered.get(timeout=60) == 1


def test_a_failed_snapshot_is_in_the_journal_at_once(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1000, history=history, stats_every=0) as session:
        session.wait()
        session._committer.failed(7, RuntimeError("disk full"))
        one_step(model, optimizer)
        session.snapshot()
        one_step(model, optimizer)
        session._committer.wait_below(1)
        names = History.open(history).query("SELECT step FROM events WHERE name = 'failed'").to_pylist()
        assert names == [{"step": 7}]
        session._committer.take_failures()


def test_a_metric_of_a_device_is_read_when_it_is_computed(history):
    """Another stream than the reader's computes it; in a graph that is being captured it is not computed at all."""
    create_history(history)
    facts = RunFacts(new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(), 1, None, None, "layout", {})
    create_run(history, facts)
    run = RunWriter(history, run=facts.run, rank=0, world_size=1, layout_hash="layout")
    marks = LateMarks()
    committer = Committer(run, stats_every=0, marks=marks)
    loss = torch.tensor(float("nan"))
    marks.give(lambda: loss.fill_(2.5))
    committer.metrics(1, {"loss": loss, "lr": 0.1})
    marks.recording = True
    committer.metrics(2, {"loss": torch.tensor(7.0), "lr": 0.2})
    marks.recording = False
    committer.close()
    run.close()
    assert committer.take_failures() == []
    rows = History.open(history).query("SELECT step, name, value FROM metrics ORDER BY step, name").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(1, "loss", 2.5), (1, "lr", 0.1), (2, "lr", 0.2)]
