"""The columns that registration computes, and the matrices of queries, equal brute force on small histories."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from explorer_helpers import Run, history_of, shares, whole

from catalog.history import History
from catalog.index import index, ingest
from catalog.index.database import database
from catalog.index.schema import TABLES, VERSION
from catalog.records import CheckpointRef
from catalog.statistics.compute import analyze_part, missing_parts

SHAPES = {"a.0.weight": (40, 30), "a.1.weight": (300,), "b.bias": (20,), "c.scalar": ()}
UPDATES = (
    "SELECT run, step, kind, name, since, norm_before, update_norm, cosine, relative_update "
    "FROM statistics ORDER BY ALL"
)
EVERYTHING = [
    f"SELECT * FROM {table} ORDER BY ALL" for table in ("checkpoints", "tensors", "statistics", "sketches", "metrics")
]


def states(count, *, seed=0):
    """Draw a walk of small steps in which c.scalar never changes."""
    draw = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    for _ in range(count):
        yield dict(state)
        state = {
            name: tensor if name == "c.scalar" else tensor + 0.01 * torch.randn(tensor.shape, generator=draw)
            for name, tensor in state.items()
        }


def walk(root, steps, *, run="run-a", analyzed=(), **options):
    """Write a run with a checkpoint at each of the steps, and then statistics of those `analyzed`, in that order."""
    training = Run(root, run, **options)
    for step, state in zip(steps, states(len(steps)), strict=True):
        training.checkpoint(step, whole(state), loss=float(step))
    training.close()
    history = History.open(root)
    for step in analyzed:
        analyze(history, run, step)
    return history


def analyze(history, run, step):
    for part in missing_parts(history.paths, CheckpointRef(run, step)):
        analyze_part(history.paths, run, part)
    index.register(history.paths, patience_s=10.0)


def expected_updates(history, run, steps):
    """Compute the update of each analyzed step since the one before it by numpy, from sketches and norms."""
    figures = {
        (row["step"], row["name"]): row
        for row in history.query("SELECT * FROM statistics").to_pylist()
        if row["run"] == run
    }
    sketches = {
        (row["step"], row["name"]): np.array(row["sketch"]) for row in history.query("FROM sketches").to_pylist()
    }
    for before, after in pairwise(steps):
        for name in SHAPES:
            old, new = sketches.get((before, name)), sketches.get((after, name))
            if old is not None:
                yield (
                    after,
                    name,
                    before,
                    figures[before, name]["norm"],
                    np.linalg.norm(new - old),
                    old @ new / np.linalg.norm(old) / np.linalg.norm(new),
                )


def assert_updates(history, steps, *, run="run-a"):
    found = {(row["step"], row["name"]): row for row in history.query(UPDATES).to_pylist() if row["run"] == run}
    assert {step for step, _ in found} == set(steps)
    assert all(found[steps[0], name]["since"] is None for name in SHAPES)
    compared = 0
    for step, name, since, norm_before, update_norm, cosine in expected_updates(history, run, steps):
        row = found[step, name]
        assert row["since"] == since
        assert row["norm_before"] == pytest.approx(norm_before, rel=1e-12)
        assert row["update_norm"] == pytest.approx(update_norm, rel=1e-4)
        assert row["cosine"] == pytest.approx(cosine, abs=1e-6)
        assert row["relative_update"] == pytest.approx(update_norm / norm_before, rel=1e-4)
        compared += 1
    assert compared == 3 * (len(steps) - 1), "the scalar has no sketch"


@pytest.mark.parametrize("order", [(0, 10, 20, 30), (30, 20, 10, 0), (10, 30, 0, 20)], ids=str)
def test_updates_do_not_depend_on_the_order_of_the_statistics(order, tmp_path):
    """Later statistics of a step between two analyzed ones change the step that the second counts from."""
    history = walk(tmp_path / "h", (0, 10, 20, 30), analyzed=order)
    assert_updates(history, (0, 10, 20, 30))
    incremental = [history.query(sql) for sql in EVERYTHING]
    history.reindex()
    assert [history.query(sql) for sql in EVERYTHING] == incremental
    (tmp_path / "h" / "catalog.duckdb").unlink()
    assert [history.query(sql) for sql in EVERYTHING] == incremental, "without an index all is the same"


def test_updates_are_seen_before_they_are_registered(tmp_path):
    history = walk(tmp_path / "h", (0, 10, 20), analyzed=(0, 20))
    assert_updates(history, (0, 20))
    for part in missing_parts(history.paths, CheckpointRef("run-a", 10)):
        analyze_part(history.paths, "run-a", part)
    assert_updates(history, (0, 10, 20))


def test_four_ranks_have_the_updates_of_one(tmp_path):
    one, four = (tuple(states(3)) for _ in range(2))
    histories = [
        history_of(tmp_path / "one", *([whole(state)] for state in one), world_sizes=(1, 1, 1)),
        history_of(tmp_path / "four", *(shares(state, 4) for state in four), world_sizes=(4, 4, 4)),
    ]
    for explorer in histories:
        explorer.analyze(quiet=True)
    moves = [
        explorer.sql("SELECT name, update_norm, cosine FROM statistics ORDER BY step, name") for explorer in histories
    ]
    for alone, together in zip(*moves, strict=True):
        assert alone["name"] == together["name"]
        for figure in ("update_norm", "cosine"):
            assert (
                alone[figure] == pytest.approx(together[figure], rel=1e-9, abs=1e-12, nan_ok=True)
                if alone[figure] is not None
                else together[figure] is None
            )


def test_a_tensor_that_is_not_finite_has_no_update(tmp_path):
    training = Run(tmp_path / "h")
    for step, broken in enumerate((False, True, False, False)):
        state = {"w": torch.ones(64) + step}
        if broken:
            state["w"][3] = float("nan")
        training.checkpoint(step, whole(state))
    training.close()
    history = History.open(tmp_path / "h")
    for step in range(4):
        analyze(history, "run-a", step)
    assert [row["update_norm"] is None for row in history.query(UPDATES).to_pylist()] == [True, True, True, False]


def test_a_removed_step_is_not_counted_from_in_a_new_index(tmp_path):
    history = walk(tmp_path / "h", (0, 10, 20), analyzed=(0, 10, 20))
    shutil.rmtree(history.paths.step_dir("run-a", 10))
    history.reindex()
    assert_updates(history, (0, 20))


def test_a_removed_step_is_not_counted_from_for_a_later_one(tmp_path):
    history = walk(tmp_path / "h", (0, 10, 20), analyzed=(0, 10))
    shutil.rmtree(history.paths.step_dir("run-a", 10))
    analyze(history, "run-a", 20)
    assert_updates(history, (0, 20))


def test_an_index_of_the_version_before_is_brought_up_to_date_by_the_next_registration(tmp_path):
    history = walk(tmp_path / "h", (0, 10, 20), analyzed=(0, 10, 20))
    expected = [history.query(sql) for sql in EVERYTHING]
    with database(history.paths).writing(patience_s=10) as connection:
        connection.execute("UPDATE idx.meta SET version = 2")
        for column in ("since", "norm_before", "update_norm", "cosine"):
            connection.execute(f"ALTER TABLE idx.statistics DROP COLUMN {column}")
        for table in ("audit", "audits"):
            connection.execute(f"DROP TABLE idx.{table}")
    assert [history.query(sql) for sql in EVERYTHING] == expected, "a reader does without it"
    index.register(history.paths, patience_s=10)
    assert [history.query(sql) for sql in EVERYTHING] == expected
    with database(history.paths).reading(patience_s=10) as connection:
        assert connection.execute("SELECT version FROM idx.meta").fetchall() == [(VERSION,)]
        assert connection.execute("SELECT count(*) FROM idx.statistics").fetchall() == [(3 * len(SHAPES),)]


@pytest.mark.slow
def test_a_history_larger_than_memory_is_registered_in_batches(tmp_path, monkeypatch):
    """Each batch takes the first missing files, even where no parsed file is kept."""
    history = walk(tmp_path / "h", range(30), analyzed=range(0, 30, 2))
    expected = [history.query(sql) for sql in EVERYTHING]
    monkeypatch.setattr(index, "_cache", ingest.RowCache(limit_bytes=1))
    monkeypatch.setattr(index, "_MAX_UNPARSED", 4)
    monkeypatch.setattr(index, "_MAX_BATCH", 6)
    assert history.reindex() == 30
    with database(history.paths).reading(patience_s=10) as connection:
        counts = {table: connection.execute(f"SELECT count(*) FROM idx.{table}").fetchall()[0][0] for table in TABLES}
    assert counts["checkpoints"] == 30
    assert counts["analyses"] == 15
    assert counts["statistics"] == 15 * len(SHAPES)
    assert [history.query(sql) for sql in EVERYTHING] == expected


def test_a_checkpoint_inserted_at_the_end_of_a_batch_changes_the_one_after_it(tmp_path, monkeypatch):
    training = Run(tmp_path / "h")
    first, _, third = states(3)
    training.checkpoint(0, whole(first))
    training.checkpoint(20, whole(third))
    monkeypatch.setattr(index, "_MAX_UNPARSED", 1)
    monkeypatch.setattr(index, "_cache", ingest.RowCache())
    writer = training.writers[0]
    training.checkpoint(10, whole(third))
    training.close()
    assert writer.paths.marker("run-a", 10).exists()
    history = History.open(tmp_path / "h")
    index.register(history.paths, patience_s=10)
    changed = history.query("SELECT step, bool_or(changed) AS any FROM tensors GROUP BY step ORDER BY step").to_pylist()
    assert changed == [{"step": 0, "any": None}, {"step": 10, "any": True}, {"step": 20, "any": False}]


def test_queries_inside_asking_see_nothing_new_in_between(tmp_path):
    training = Run(tmp_path / "h")
    first, second = states(2)
    training.checkpoint(0, whole(first))
    history = History.open(tmp_path / "h")
    with history.asking() as ask:
        before = ask("SELECT count(*) AS n FROM tensors")
        training.checkpoint(10, whole(second))
        assert ask("SELECT count(*) AS n FROM tensors") == before
    assert history.query("SELECT count(DISTINCT step) AS n FROM tensors").to_pylist() == [{"n": 2}]
    training.close()


def test_a_trajectory_of_one_tensor_reads_no_sketch(tmp_path, monkeypatch):
    """A trajectory of updates reads no sketch and opens no manifest."""
    from catalog.read import checkpoint
    from dshistory import Explorer
    from dshistory.trends import trajectory

    history = walk(tmp_path / "h", (0, 10, 20), analyzed=(0, 10, 20))
    asked = []

    def never(*_, **__):
        raise AssertionError("a manifest was read")

    original = index.select
    monkeypatch.setattr(
        index, "select", lambda connection, sql, params: asked.append(sql) or original(connection, sql, params)
    )
    monkeypatch.setattr(checkpoint, "read_part", never)
    monkeypatch.setattr("catalog.history.read_checkpoint", never)
    monkeypatch.setattr(trajectory, "AT_ONCE_BYTES", 0)
    table = Explorer(history).trajectory("a.0.weight", metric="update_ratio", quiet=True)
    assert [value is None for value in table["value"].to_pylist()] == [True, False, False]
    assert asked
    assert not any("sketch" in sql for sql in asked)
