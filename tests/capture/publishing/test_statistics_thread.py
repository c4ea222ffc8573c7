"""Statistics of a session's commits are right, complete and merged over fragments, and never delay a checkpoint."""

import logging
import threading

import numpy as np
import pytest
import torch
from capture_helpers import make, one_step, reference

import capture
import dshistory
from capture.publishing.statistics_thread import StatisticsThread
from catalog.errors import CorruptError
from catalog.format.statistics_file import parse_name
from catalog.history import History
from catalog.index import index
from catalog.run_writer import RunWriter
from catalog.statistics.compute import analyze_part, missing_parts
from catalog.verify import verify

pytestmark = pytest.mark.slow


def train(history, *, steps=4, frozen=False, **options):
    """Train, close the session and return the reference states by step."""
    model, optimizer = make(256)
    if frozen:
        model.inner.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    expected = {}
    with capture.enable(model, optimizer=optimizer, history=history, every=1, **options) as session:
        for _ in range(steps):
            one_step(model, optimizer)
            session.wait()
            expected[session.snapshot()] = reference(model, optimizer)
    return expected


def rows_of(history, sql="SELECT * FROM statistics ORDER BY step, kind, name"):
    return History.open(history).query(sql).to_pylist()


def without_updates(row):
    """Return the columns of a row that depend on its own step only."""
    moves = ("since", "norm_before", "update_norm", "cosine", "relative_update")
    return {name: value for name, value in row.items() if name not in moves}


def test_every_statistic_equals_that_of_the_tensor(history):
    expected = train(history)
    dshistory.open(history).analyze(quiet=True)
    rows = {(row["step"], row["kind"], row["name"]): row for row in rows_of(history) if row["step"]}
    tensors = {
        (step, kind, name): tensor
        for step, kinds in expected.items()
        for kind, of_kind in kinds.items()
        for name, tensor in of_kind.items()
    }
    assert rows.keys() == tensors.keys()
    for key, tensor in tensors.items():
        row, exact = rows[key], tensor.double().reshape(-1)
        assert row["numel"] == exact.numel()
        assert (row["nan"], row["inf"], row["zeros"]) == (0, 0, int((exact == 0).sum()))
        assert (row["min"], row["max"]) == (float(exact.min()), float(exact.max()))
        assert row["sum"] == pytest.approx(float(exact.sum()), rel=1e-9, abs=1e-9)
        assert row["norm"] == pytest.approx(float(exact.norm()), rel=1e-9)
        assert row["mean"] == pytest.approx(float(exact.mean()), rel=1e-9, abs=1e-12)


def test_sketches_estimate_the_distance_of_two_steps(history):
    expected = train(history)
    dshistory.open(history).analyze(quiet=True)
    sketches = {
        (row["step"], row["kind"], row["name"]): np.array(row["sketch"])
        for row in rows_of(history, "SELECT * FROM sketches")
    }
    for kind, name in [("model", "inner.weight"), ("exp_avg", "outer.weight")]:
        estimate = np.linalg.norm(sketches[4, kind, name] - sketches[1, kind, name])
        exact = float((expected[4][kind][name].double() - expected[1][kind][name].double()).norm())
        assert estimate == pytest.approx(exact, rel=0.25)
    assert (1, "model", "norm.weight") in sketches
    assert not any(kind in ("buffer", "step") for _, kind, _ in sketches)


def test_no_statistics_are_computed_where_none_are_wanted_and_analyze_adds_them(history):
    train(history, stats_every=0)
    assert rows_of(history) == []
    explorer = dshistory.open(history)
    assert len(explorer.analyze(2, quiet=True)) == 1
    assert {row["step"] for row in rows_of(history)} == {2}
    assert len(explorer.analyze(quiet=True)) == 4
    assert len(explorer.analyze(quiet=True)) == 0
    assert {row["step"] for row in rows_of(history)} == {0, 1, 2, 3, 4}


def test_the_index_can_be_rebuilt_and_is_not_needed(history):
    train(history)
    explorer = dshistory.open(history)
    explorer.analyze(quiet=True)
    indexed = rows_of(history)
    paths = History.open(history).paths
    paths.catalog_db.unlink()
    assert rows_of(history) == indexed
    index.reindex(paths)
    assert rows_of(history) == indexed


def test_unchanged_tensors_are_not_read_again(history, monkeypatch):
    train(history, frozen=True, stats_every=0)
    opened = History.open(history)
    refs = opened.checkpoints()
    read = {}
    for ref in refs:
        (part,) = missing_parts(opened.paths, ref)
        sizes: list[int] = []
        analyze_part(opened.paths, ref.run, part, progress=sizes.append)
        read[ref.step] = sum(sizes)
    frozen_bytes = (256 * 256 + 256) * 4  # the weight and the bias of one layer
    assert read[3] == read[1] - frozen_bytes
    rows = {row["step"]: row for row in rows_of(history) if (row["kind"], row["name"]) == ("model", "inner.weight")}
    assert rows[4] == {**rows[1], "step": 4, "since": 3}
    assert rows[4]["update_norm"] == 0


def test_a_damaged_file_of_statistics_is_named_and_counts_as_none(history):
    train(history)
    dshistory.open(history).analyze(quiet=True)
    opened = History.open(history)
    before = rows_of(history)
    folder = opened.paths.statistics_dir(opened.current_run())
    path = sorted(path for path in folder.iterdir() if parse_name(path.name))[2]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    opened.paths.catalog_db.unlink()
    after = rows_of(history)
    assert list(map(without_updates, after)) == [without_updates(row) for row in before if row["step"] != 2]
    assert {row["since"] for row in after if row["step"] == 3} == {1}, (
        "what moved is counted from the one before that is whole"
    )
    assert [problem.file for problem in verify(opened)] == [opened.paths.relative(path)]


def test_the_statistics_of_damaged_bytes_are_refused(history):
    train(history, stats_every=0)
    opened = History.open(history)
    ref = opened.resolve(3)
    victim = next(extent for extent in opened.extents(ref) if extent.kind == "exp_avg" and extent.nbytes > 1000)
    with (history / victim.file).open("r+b") as file:
        file.seek(victim.offset + 100)
        file.write(b"\xff")
    with pytest.raises(CorruptError, match=victim.name):
        dshistory.open(history).analyze(3, quiet=True)
    assert rows_of(history) == []


def test_close_says_what_is_left_to_analyze(history, caplog):
    model, optimizer = make(256)
    session = capture.enable(model, optimizer=optimizer, history=history, every=1)
    for _ in range(3):
        one_step(model, optimizer)
        session.wait()
    session._committer._statistics.give_up()
    with caplog.at_level(logging.INFO, logger="capture"):
        session.close()
    opened = History.open(history)
    refs = opened.checkpoints()
    left = sum(len(missing_parts(opened.paths, ref)) for ref in refs)
    assert session.stats.without_statistics == left
    said = f"{left} of {len(refs)} checkpoints of rank 0 have no statistics yet"
    assert [record.message for record in caplog.records] == [
        f"run {session.run}: {said}: dshistory analyze {history}"
    ] * bool(left)
    (row,) = opened.query("SELECT count(*) AS n FROM events WHERE name = 'statistics_left'").to_pylist()
    assert row["n"] == bool(left)


def test_close_waits_for_no_batch_that_takes_longer(history):
    """The thread is held in the middle of its work, as by a machine whose cores are all taken."""
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, history=history, every=1000, stats_every=0) as session:
        session.wait()
    working, go_on = threading.Event(), threading.Event()

    def hold(seconds):
        working.set()
        go_on.wait()

    facts = History.open(history).run_facts(session.run)
    run = RunWriter(history, run=session.run, rank=0, world_size=1, layout_hash=facts.layout_hash)
    with run:
        statistics = StatisticsThread(run, every=1, wait_idle=hold)
        statistics.published(0)
        working.wait()
        closing = threading.Thread(target=statistics.close, daemon=True)
        closing.start()
        closing.join(60)
        try:
            assert not closing.is_alive()
            assert statistics.left() == 1
        finally:
            go_on.set()
            closing.join()
            statistics._thread.wait()
    opened = History.open(history)
    assert len(missing_parts(opened.paths, opened.resolve(0))) == 1
