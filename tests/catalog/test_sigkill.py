"""A training killed at any point leaves a history that opens and verifies, with nothing half visible."""

import random
import subprocess
import sys

import pytest
from catalog_helpers import Run, pieces_of
from places import SUPPORT

from catalog.disk.durable import is_temporary
from catalog.gc import Collected, collect_garbage
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

pytestmark = pytest.mark.slow

PROGRAM = str(SUPPORT / "catalog_processes.py")
KILLS = 24
TENSORS = 4


def killed_training(root, run, *, lines_heard):
    """Start a training, kill it after it has printed so many lines, and return what it reported as committed."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "train-until-killed", str(root), run], stdout=subprocess.PIPE, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if len(lines) > lines_heard:
            break
    # A little work, and no waiting time, varies the instruction that the kill meets.
    sum(range(random.Random(run).randrange(3_000_000)))
    process.kill()
    rest = process.communicate()[0]
    return [int(line) for line in "".join([*lines[1:], rest]).split("\n")[:-1] if line.strip().isdigit()]


@pytest.mark.long
@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_training_killed_at_any_point(tmp_path, figure):
    root = tmp_path / "h"
    chance = random.Random(7)
    for kill in range(KILLS):
        run = f"run-{kill:02d}"
        said = killed_training(root, run, lines_heard=chance.randrange(6))
        history = History.open(root)
        assert not history.held(run)
        committed = [ref.step for ref in history.checkpoints(run)]
        assert set(said) <= set(committed)
        assert committed == list(range(len(committed)))
        assert verify(history, history.checkpoints(run)) == []
        rows = history.query("SELECT step, count(*) AS n FROM tensors WHERE run = ? GROUP BY step ORDER BY step", [run])
        assert rows.to_pylist() == [{"step": step, "n": TENSORS} for step in committed]
        states = history.query("SELECT DISTINCT state FROM checkpoints").to_pylist()
        assert {row["state"] for row in states} <= {"committed", "incomplete"}
    tables = ("runs", "checkpoints", "tensors", "fragments", "metrics", "events", "tags")
    before = [history.query(f"SELECT * FROM {table} ORDER BY ALL").to_pylist() for table in tables]
    history.reindex()
    assert [history.query(f"SELECT * FROM {table} ORDER BY ALL").to_pylist() for table in tables] == before
    assert verify(history) == []
    collected = collect_garbage(history.paths)
    assert collected.kept == []
    for ref in collected.checkpoints:
        assert history.state(ref.run, ref.step) == "incomplete"
    assert verify(history) == []
    assert not [path for path in root.rglob("*") if is_temporary(path.name) and path.parent != root]
    figure("kills", KILLS)


@pytest.mark.long
@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_training_killed_before_each_of_its_calls_to_the_file_system(tmp_path, figure):
    """Two ranks train two steps and are killed before the first call, the second, and so on to the last."""
    root = tmp_path / "h"
    command = [sys.executable, PROGRAM, "train-killed-everywhere", str(root)]
    kills = int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout)
    assert kills > 40
    figure("kills", kills)
    history = History.open(root)
    assert verify(history) == []
    refs = history.checkpoints()
    counts = [sum(ref.run == run.run for ref in refs) for run in history.runs()]
    assert {0, 1, 2} == set(counts)
    assert counts == sorted(counts)
    rows = history.query("SELECT run, step, count(*) AS n FROM tensors GROUP BY run, step ORDER BY ALL").to_pylist()
    assert [CheckpointRef(row["run"], row["step"]) for row in rows] == refs
    assert {row["n"] for row in rows} == {2}
    assert collect_garbage(history.paths).kept == []
    assert history.checkpoints() == refs
    assert verify(history) == []
    assert not [
        path for path in (root / "runs").rglob(".*") if (path.parent / "run.json").exists() or "steps" in path.parts
    ]


@pytest.mark.guards("Nothing of others is deleted")
@pytest.mark.parametrize("world_size", [1, 2])
def test_gc_removes_leftovers_of_dead_runs_and_keeps_live_runs(tmp_path, world_size):
    live = Run(tmp_path / "h", "live", world_size=world_size)
    dead = Run(tmp_path / "h", "dead", world_size=world_size)
    ranks = [pieces_of({f"w{rank}": b"a"}) for rank in range(world_size)]
    for run in (live, dead):
        run.checkpoint(0, *ranks)
        for rank in range(world_size):
            run.part(1, rank, ranks[rank])
        run.writers[0].begin(2).write_bytes(b"half")
    history = History.open(tmp_path / "h")
    assert collect_garbage(history.paths) == Collected()
    for writer in dead.writers:
        assert collect_garbage(history.paths) == Collected()
        writer.close()
    assert collect_garbage(history.paths) == Collected([CheckpointRef("dead", 1), CheckpointRef("dead", 2)])
    assert collect_garbage(history.paths) == Collected()
    assert {step: history.state("dead", step) for step in (0, 1, 2)} == {
        0: "committed",
        1: "incomplete",
        2: "incomplete",
    }
    assert {step: history.state("live", step) for step in (0, 1, 2)} == {0: "committed", 1: "pending", 2: "pending"}
    assert live.writers[0].try_commit(1)
    assert verify(history) == []
    live.close()
