"""The run writer makes everything durable before anything names it, and excludes a second writer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import LAYOUT, Piece, Run, data_file_bytes, pieces_of

from catalog.errors import FormatError, MismatchError, SetupError, SnapshotError
from catalog.format.extents import extent_table
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef, RunFacts
from catalog.run_writer import RunWriter, create_history, create_run, new_run_id

PIECES = pieces_of({"w": b"1234"})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record every call that makes something durable or gives it a name."""
    made: list[tuple[str, str]] = []

    def watch(name: str, subject: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            made.append((name, subject(*arguments)))
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    for sync in ("fsync", "fdatasync"):
        watch(sync, lambda handle: _plain(str(Path(f"/proc/self/fd/{handle}").readlink())))
    watch("rename", lambda source, target, **_: _plain(str(target)))
    watch("link", lambda source, target, **_: _plain(str(target)))
    watch("mkdir", lambda path, *_, **__: _plain(str(path)))
    return made


def _plain(path: str) -> str:
    """Return the last part of a path, without the random part of a temporary name."""
    name = path.rpartition("/")[2]
    return ".".join(name.split(".")[:-2]) + ".tmp" if name.endswith(".tmp") else name


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_each_thing_is_durable_before_the_next_one_names_it(history: Path, calls: list[tuple[str, str]]) -> None:
    with Run(history) as run:
        calls.clear()
        run.part(50, 0, PIECES)
        run.writers[0].try_commit(50)
    step = "000000000050"
    expected = [
        ("mkdir", step),
        ("fsync", "steps"),
        ("fsync", ".rank-00000.safetensors.tmp"),
        ("rename", "rank-00000.safetensors"),
        ("fsync", step),
        ("fsync", ".rank-00000.manifest.parquet.tmp"),
        ("rename", "rank-00000.manifest.parquet"),
        ("fsync", step),
        ("fsync", ".commit.json.tmp"),
        ("link", "commit.json"),
        ("fsync", step),
    ]
    remaining = iter(calls)
    assert all(call in remaining for call in expected), calls
    assert [call for call in calls if call[0] in ("rename", "link")] == [
        call for call in expected if call[0] in ("rename", "link")
    ]


def test_a_history_and_a_run_are_durable_once_made(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    create_history(tmp_path / "h")
    create_run(tmp_path / "h", _facts("run-a"))
    made = [call for call in calls if call[0] == "fsync"]
    assert ("fsync", "h") in made
    assert ("fsync", ".run.json.tmp") in made
    assert made[-1] == ("fsync", "runs")


def _facts(run: str) -> RunFacts:
    return RunFacts(run, "2026-11-21T10:15:02+00:00", 1, None, None, LAYOUT, {})


def test_a_run_is_made_once(history: Path) -> None:
    create_history(history)
    create_run(history, _facts("run-a"))
    with pytest.raises(MismatchError, match="exists"):
        create_run(history, _facts("run-a"))


def test_a_history_made_twice_is_the_same(history: Path) -> None:
    assert create_history(history) == create_history(history) == History.open(history).uuid


def test_a_folder_with_other_files_is_refused_for_a_history(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="thesis"):
        create_history(tmp_path)


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [run[:15] for run in ids] == sorted(run[:15] for run in ids)


def test_two_processes_never_write_one_rank(history: Path) -> None:
    with Run(history):
        program = (
            "import sys\nfrom pathlib import Path\nfrom catalog.run_writer import RunWriter\n"
            "RunWriter(Path(sys.argv[1]), run='run-a', rank=0, world_size=1, layout_hash='layout-1')\n"
        )
        second = subprocess.run([sys.executable, "-c", program, str(history)], capture_output=True, text=True)
    assert second.returncode != 0
    assert "another live process writes this rank" in second.stderr


def test_a_closed_writer_releases_its_lock(history: Path) -> None:
    with Run(history) as run:
        opened = History.open(history)
        assert opened.held("run-a")
        run.close()
        run.close()
        assert not opened.held("run-a")


def test_a_step_is_captured_once(history: Path) -> None:
    with Run(history) as run:
        run.checkpoint(0, PIECES, register=False)
        with pytest.raises(SnapshotError, match="captured already"):
            run.writers[0].begin(0)


def test_a_failed_snapshot_leaves_nothing_and_is_reported(history: Path) -> None:
    with Run(history) as run:
        run.checkpoint(0, PIECES)
        writer = run.writers[0]
        tmp = writer.begin(10)
        tmp.write_bytes(b"half")
        writer.discard(10, reason="No space left on device")
        writer.journal.flush()
        assert not tmp.exists()
        opened = History.open(history)
        assert opened.checkpoints() == [CheckpointRef("run-a", 0)]
        assert opened.state("run-a", 10) == "failed"
        (event,) = opened.query("SELECT name, step, rank, detail->>'reason' AS reason FROM events").to_pylist()
        assert event == {"name": "failed", "step": 10, "rank": 0, "reason": "No space left on device"}


def test_extents_that_do_not_cover_the_file_publish_nothing(history: Path) -> None:
    with Run(history) as run:
        writer = run.writers[0]
        content, extents = data_file_bytes([Piece("a", b"12"), Piece("b", b"34")])
        tmp = writer.begin(0)
        tmp.write_bytes(content)
        with pytest.raises(FormatError, match="without an owner"):
            writer.publish_part(
                0, data_tmp=tmp, extents=extent_table([extent for extent in extents if extent.name != "a"])
            )
        assert list(HistoryPaths(history).step_dir("run-a", 0).glob("rank-*")) == []


def test_the_journal_is_flushed_before_the_checkpoint_it_describes(history: Path) -> None:
    """A reader that sees a checkpoint also sees its loss."""
    with Run(history) as run:
        run.writers[0].journal.metric(0, "loss", 1.5)
        run.part(0, 0, PIECES)
        assert run.writers[0].try_commit(0)
        opened = History.open(history)
        assert opened.query("SELECT value FROM metrics JOIN checkpoints USING (run, step)").to_pylist() == [
            {"value": 1.5}
        ]


def test_a_busy_index_never_delays_register(history: Path) -> None:
    with Run(history) as run:
        run.checkpoint(0, PIECES)
        program = (
            "import sys, duckdb\ncon = duckdb.connect(sys.argv[1])\n"
            "print('holding', flush=True)\nsys.stdin.readline()\n"
        )
        stranger = subprocess.Popen(
            [sys.executable, "-c", program, str(history / "catalog.duckdb")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "holding\n"
        run.checkpoint(1, PIECES, register=False)
        assert run.register() == 0
        assert History.open(history).query("SELECT count(*) AS n FROM checkpoints").to_pylist() == [{"n": 2}]
        stranger.communicate("go on\n")
        run.checkpoint(2, PIECES, register=False)
        assert run.register(patience_s=10.0) == 2


def test_a_writer_of_a_run_that_was_never_made_is_refused(history: Path) -> None:
    create_history(history)
    with pytest.raises((SetupError, FileNotFoundError)):
        RunWriter(history, run="run-z", rank=0, world_size=1, layout_hash=LAYOUT)
