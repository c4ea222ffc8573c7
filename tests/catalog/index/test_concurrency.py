"""A training, readers and a foreign process use the index at once in real processes, and none holds it."""

import os
import subprocess
import sys

import pytest
from catalog_helpers import Run, pieces_of
from catalog_processes import TABLES, TENSORS
from places import SUPPORT

from catalog.errors import FormatError
from catalog.history import History
from catalog.index import index

pytestmark = pytest.mark.slow

PROGRAM = str(SUPPORT / "catalog_processes.py")
STEPS = 120


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process, timeout_s=240):
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    assert err == "", err
    return out


def content(history):
    return {table: history.query(f"SELECT * FROM {table} ORDER BY ALL").to_pylist() for table in TABLES}


def test_a_training_readers_and_a_foreign_process_at_once(tmp_path):
    root, stop = tmp_path / "h", tmp_path / "stop"
    with Run(root, "run-0") as first:
        first.checkpoint(0, pieces_of({f"layer.{i}": b"x" for i in range(TENSORS)}))
    readers = [start("read", root, stop) for _ in range(2)]
    training = start("train", root, "run-1", STEPS)
    stranger = start("hold", root / "catalog.duckdb", 3)
    trained = finish(training)
    finish(stranger)
    stop.touch()
    for reader in readers:
        rounds = finish(reader).split()
        assert int(rounds[1]) > 0
    history = History.open(root)
    assert int(trained.split()[1]) <= STEPS
    assert len(history.checkpoints("run-1")) == STEPS
    found = history.query("SELECT count(*) AS n FROM checkpoints WHERE run = 'run-1' AND state = 'committed'")
    assert found.to_pylist() == [{"n": STEPS}]
    before = content(history)
    assert len(before["metrics"]) == STEPS
    assert history.reindex() == STEPS + 1
    assert content(history) == before


def test_a_foreign_process_that_writes_causes_no_error_for_readers_or_the_training(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}), loss=1.0)
        stranger = start("hold", tmp_path / "h" / "catalog.duckdb", 600)
        assert stranger.stdout.readline() == "holding\n"
        run.checkpoint(1, pieces_of({"w": b"b"}), loss=2.0, register=False)
        assert run.register() == 0
        history = History.open(tmp_path / "h")
        alone = content(history)
        assert [row["changed"] for row in alone["tensors"]] == [None, True]
        stranger.kill()
        stranger.communicate()
        assert run.register() == 1
        assert content(history) == alone


def test_a_late_checkpoint_is_compared_with_both_neighbours(tmp_path):
    """Step 1 commits after step 2 is registered; `changed` of step 2 then refers to step 1, registered or not."""
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        run.part(1, 0, pieces_of({"w": b"b"}))
        run.checkpoint(2, pieces_of({"w": b"a"}))
        history = History.open(tmp_path / "h")
        changed = "SELECT step, changed FROM tensors ORDER BY step"
        assert [row["changed"] for row in history.query(changed).to_pylist()] == [None, False]
        assert run.writers[0].try_commit(1)
        unregistered = history.query(changed).to_pylist()
        assert [row["changed"] for row in unregistered] == [None, True, True]
        assert run.register(patience_s=10) == 1
        assert history.query(changed).to_pylist() == unregistered
        assert history.reindex() == 3
        assert history.query(changed).to_pylist() == unregistered


def test_one_register_adds_everything_that_is_missing(tmp_path):
    with Run(tmp_path / "h") as run:
        for step in range(40):
            run.checkpoint(step, pieces_of({"w": bytes([step])}), register=False)
        assert run.register(patience_s=10) == 40
        assert run.register(patience_s=10) == 0


def test_a_checkpoint_registered_is_not_parsed_again(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        run.writers[0].paths.manifest("run-a", 0, 0).write_bytes(b"damaged behind the index' back")
        # The marker's time is part of how parsed rows are known, so this process would have to parse again.
        os.utime(run.writers[0].paths.marker("run-a", 0), (0, 0))
        history = History.open(tmp_path / "h")
        assert history.query("SELECT name FROM tensors").to_pylist() == [{"name": "w"}]
        assert history.query("FROM events").num_rows == 0
        (tmp_path / "h" / "catalog.duckdb").unlink()
        assert history.query("FROM events").num_rows == 1


def test_a_removed_folder_disappears_from_the_answers(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        run.checkpoint(1, pieces_of({"w": b"b"}))
        folder = run.writers[0].paths.step_dir("run-a", 0)
        folder.rename(tmp_path / "moved")
        history = History.open(tmp_path / "h")
        assert history.query("SELECT step FROM checkpoints").to_pylist() == [{"step": 1}]
        before = content(history)
        history.reindex()
        assert content(history)["checkpoints"] == before["checkpoints"]


def test_a_damaged_manifest_is_an_event_and_hides_nothing_else(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        run.checkpoint(1, pieces_of({"w": b"b"}), register=False)
        manifest = run.writers[0].paths.manifest("run-a", 1, 0)
        manifest.write_bytes(manifest.read_bytes()[:-1])
        history = History.open(tmp_path / "h")
        states = history.query("SELECT step, state FROM checkpoints ORDER BY step").to_pylist()
        assert states == [{"step": 0, "state": "committed"}, {"step": 1, "state": "failed"}]
        (event,) = history.query("SELECT name, step, detail FROM events").to_pylist()
        assert (event["name"], event["step"]) == ("damaged", 1)
        assert "manifest_checksum" in event["detail"]
        assert run.register(patience_s=10) == 0


@pytest.mark.filterwarnings("ignore:.*DuckDB can't use the index")
def test_a_file_that_is_not_an_index_is_replaced_by_the_next_registration(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        history = History.open(tmp_path / "h")
        run.writers[0].paths.catalog_db.write_bytes(b"not a database" * 1000)
        assert history.query("SELECT step FROM checkpoints").to_pylist() == [{"step": 0}]
        assert run.register(patience_s=10) == 1
        assert history.query("SELECT step FROM checkpoints").to_pylist() == [{"step": 0}]


def test_an_index_of_a_newer_version_is_refused(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        program = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); c.execute('UPDATE meta SET version = 99')"
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "h" / "catalog.duckdb")], check=True)
        with pytest.raises(FormatError, match=r"version 99.*newer"):
            History.open(tmp_path / "h").query("SELECT 1")


def test_an_empty_index_of_version_0_is_brought_up_to_date(tmp_path):
    with Run(tmp_path / "h") as run:
        program = "import duckdb, sys; duckdb.connect(sys.argv[1]).close()"
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "h" / "catalog.duckdb")], check=True)
        run.checkpoint(0, pieces_of({"w": b"a"}), register=False)
        history = History.open(tmp_path / "h")
        assert history.query("SELECT step FROM checkpoints").to_pylist() == [{"step": 0}]
        assert run.register(patience_s=10) == 1
        assert history.query("SELECT step FROM checkpoints").to_pylist() == [{"step": 0}]


def test_the_index_module_never_leaves_a_file_attached(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        index.query(run.writers[0].paths, "SELECT 1")
        program = "import duckdb, sys; duckdb.connect(sys.argv[1]).execute('SELECT count(*) FROM checkpoints')"
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "h" / "catalog.duckdb")], check=True)


def test_a_forked_child_has_its_own_database_and_no_locks(tmp_path):
    """A child, like a data loader's worker, may query, and does not hold the run when it outlives its training."""
    program = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from catalog_helpers import Run, pieces_of\nfrom catalog.history import History\n"
        "from catalog.index.database import database\nrun = Run(Path(sys.argv[1]))\n"
        "run.checkpoint(0, pieces_of({'w': b'a'}))\n"
        "history = History.open(run.root)\nhistory.query('FROM runs')\nbefore = database(history.paths)\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.readline()\n"
        "    rows = history.query('FROM checkpoints').num_rows\n"
        "    print(rows, history.held('run-a'), database(history.paths) is before, flush=True)\n"
        "    os._exit(0)\n"
        "print(history.held('run-a'), flush=True)\nos._exit(0)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "h")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=SUPPORT,
    )  # fmt: skip
    assert parent.stdout.readline() == "True\n"
    parent.wait()
    out, err = parent.communicate("go\n", timeout=60)
    assert out == "1 False False\n", err
