"""The journal of a session has few files, and a checkpoint that is seen has its metrics."""

from capture_helpers import make, one_step

import capture
from catalog.format.journal import segments
from catalog.history import History


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
