"""Garbage collection removes what the format knows from runs that are certainly dead, and nothing else."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_helpers import Run, meanwhile, pieces_of

from catalog.access import liveness
from catalog.access.locked_run import locked_run
from catalog.compaction.compact import compact_run
from catalog.disk import durable, folders, json_file
from catalog.format.lock_file import lock_owner
from catalog.format.statistics_file import StatisticsFile
from catalog.gc import Collected, collect_garbage
from catalog.history import History
from catalog.later_metrics import LaterMetrics
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef
from catalog.retention.prune import remove
from catalog.statistics.compute import analyze_part

PIECES = pieces_of({"w": b"1234"})
BEGUN = CheckpointRef("dead", 1)


@pytest.fixture
def paths(tmp_path: Path) -> HistoryPaths:
    """Return a history with one dead run, whose step 0 is committed and whose step 1 was begun."""
    return _dead_run(tmp_path / "h", "dead")


def _dead_run(root: Path, name: str) -> HistoryPaths:
    with Run(root, name, world_size=2) as run:
        run.checkpoint(0, PIECES, PIECES, register=False)
        run.part(1, 0, PIECES)
        run.writers[1].begin(1).write_bytes(b"half")
    return HistoryPaths(root)


def _precious(folder: Path) -> Path:
    """Make a folder of somebody else, with names that the format uses too."""
    folder.mkdir()
    for name in ("rank-00000.safetensors", "rank-00000.manifest.parquet", "thesis.tex"):
        (folder / name).write_bytes(b"precious")
    return folder


@pytest.mark.guards("Nothing of others is deleted")
def test_a_link_to_a_folder_is_not_followed(paths: HistoryPaths, tmp_path: Path) -> None:
    target = _precious(tmp_path / "precious")
    link = paths.step_dir("dead", 7)
    link.symlink_to(target)
    paths.step_dir("dead", 8).symlink_to(tmp_path / "nowhere")
    collected = collect_garbage(paths)
    assert collected.checkpoints == [BEGUN]
    assert len(list(target.iterdir())) == 3
    assert [str(link) in kept or "000000000008" in kept for kept in collected.kept] == [True, True]
    assert link.is_symlink()


@pytest.mark.guards("Nothing of others is deleted")
@pytest.mark.parametrize("folder", ["steps", "journal", "statistics", "locks"])
def test_a_link_instead_of_a_folder_of_a_run_is_not_followed(paths: HistoryPaths, tmp_path: Path, folder: str) -> None:
    real = paths.run_dir("dead") / folder
    moved = tmp_path / "moved"
    if real.exists():
        real.rename(moved)
    else:
        moved.mkdir()
    temporary = moved / ".rank-00000-00000009.parquet.0123abcd.tmp"
    temporary.write_bytes(b"half")
    real.symlink_to(moved)
    before = sorted(moved.rglob("*"))
    collected = collect_garbage(paths)
    assert sorted(moved.rglob("*")) == before
    assert collected.checkpoints == [] or folder == "statistics"
    assert len(collected.kept) == 1


@pytest.mark.guards("Nothing of others is deleted")
def test_what_the_format_does_not_know_stays_and_is_reported(paths: HistoryPaths, tmp_path: Path) -> None:
    step = paths.step_dir("dead", 1)
    (step / "notes.txt").write_text("keep me")
    (step / ".somebody.tmp").write_text("keep me too")
    os.mkfifo(step / "rank-00009.safetensors")
    precious = tmp_path / "file"
    precious.write_text("precious")
    (step / "rank-00008.safetensors").symlink_to(precious)
    collected = collect_garbage(paths)
    assert collected.checkpoints == [BEGUN]
    assert sorted(path.name for path in step.iterdir()) == [
        ".somebody.tmp",
        "notes.txt",
        "rank-00008.safetensors",
        "rank-00009.safetensors",
    ]
    assert precious.read_text() == "precious"
    assert len(collected.kept) == 1
    assert "notes.txt" in collected.kept[0]
    assert History.open(paths.root).state("dead", 1) == "incomplete"


def test_temporary_files_of_the_format_are_removed_everywhere(paths: HistoryPaths) -> None:
    run = paths.run_dir("dead")
    paths.statistics_dir("dead").mkdir()
    leftovers = [
        run / ".run.json.0123abcd.tmp",
        paths.journal_dir("dead") / ".rank-00000-00000009.parquet.0123abcd.tmp",
        paths.statistics_dir("dead") / ".000000000000-00000-of-00002.parquet.0123abcd.tmp",
        paths.step_dir("dead", 0) / ".commit.json.0123abcd.tmp",
        paths.step_dir("dead", 0) / ".rank-00001.safetensors.0123abcd.tmp",
    ]
    others = [run / ".commit.json.0123abcd.tmp", paths.step_dir("dead", 0) / ".editor.tmp"]
    for path in (*leftovers, *others):
        path.write_bytes(b"half")
    for path in leftovers[1:3]:
        os.utime(path, (time.time() - 3700, time.time() - 3700))
    assert collect_garbage(paths).checkpoints == [BEGUN]
    assert not [path for path in leftovers if path.exists()]
    assert all(path.exists() for path in others)


def test_what_is_being_analyzed_or_evaluated_of_a_dead_run_is_published_in_spite_of_a_collection(
    paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold no lock: a collection between the writing of their file and its publication leaves it."""
    happened = meanwhile(monkeypatch, durable, "publish", lambda: collect_garbage(paths))
    assert analyze_part(paths, "dead", StatisticsFile(0, 0, 2))
    assert happened
    happened = meanwhile(monkeypatch, durable, "publish", lambda: collect_garbage(paths))
    with LaterMetrics(paths) as later:
        later.record(CheckpointRef("dead", 0), {"accuracy": 0.5})
    assert happened
    (row,) = History.open(paths.root).query("SELECT value FROM metrics WHERE name = 'accuracy'").to_pylist()
    assert row == {"value": 0.5}


def test_a_file_that_is_published_while_its_folder_is_looked_at_is_no_trouble(
    paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = paths.run_dir("dead") / ".run.json.0123abcd.tmp"
    temporary.write_bytes(b"half")
    happened = meanwhile(monkeypatch, folders, "final_name", temporary.unlink)
    assert collect_garbage(paths).kept == []
    assert happened


def test_a_run_of_another_host_that_goes_on_changing_is_not_dead(
    paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is listed may be gone when its age is asked for: a session that merges its journal takes it away."""
    for rank in range(2):
        paths.lock("dead", rank).unlink()
    segment = paths.journal_dir("dead") / "rank-00000-00000000.parquet"
    segment.write_bytes(b"")
    for path in paths.run_dir("dead").rglob("*"):
        os.utime(path, (0, 0))
    with locked_run(paths, "dead") as locked:
        assert locked
    happened = meanwhile(monkeypatch, liveness, "final_name", segment.unlink)
    with locked_run(paths, "dead") as locked:
        assert not locked
    assert happened


@pytest.mark.parametrize("trouble", ["run.json", "a lock that is a FIFO", "an unreadable folder"])
def test_trouble_with_one_run_is_that_runs(paths: HistoryPaths, trouble: str) -> None:
    _dead_run(paths.root, "ill")
    if trouble == "run.json":
        paths.run_json("ill").write_bytes(b"{}")
    elif trouble == "a lock that is a FIFO":
        paths.lock("ill", 0).unlink()
        os.mkfifo(paths.lock("ill", 0))
    else:
        # Root may read anything, so that the folder is a file here.
        paths.steps_dir("ill").rename(paths.run_dir("ill") / "moved")
        paths.steps_dir("ill").write_bytes(b"")
    collected = collect_garbage(paths)
    assert collected.checkpoints == [BEGUN]
    (kept,) = collected.kept
    assert "ill" in kept


@pytest.mark.guards("Nothing of others is deleted")
def test_a_marker_that_only_the_listing_shows_is_believed(paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a network file system may go on for a while saying that a file which it once missed is not there."""
    real = os.stat

    def stale(path: object, *arguments: object, **named: object) -> os.stat_result:
        if str(path).endswith("commit.json"):
            raise FileNotFoundError(path)
        return real(path, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stale)
    collected = collect_garbage(paths)
    monkeypatch.undo()
    assert collected.checkpoints == [BEGUN]
    assert History.open(paths.root).steps("dead") == [0]
    assert (paths.step_dir("dead", 0) / "rank-00000.safetensors").exists()


def _owner(paths: HistoryPaths, *, host: str | None = None, boot: str | None = None, shared: bool = False) -> None:
    """Say in both lock files who took them."""
    here = lock_owner()
    content = {"host": host or here.host, "boot": boot or here.boot, "shared": shared}
    for rank in (0, 1):
        paths.lock("dead", rank).write_bytes(json_file.encode(content))


def _unchanged_for(paths: HistoryPaths, seconds: float) -> None:
    then = time.time() - seconds
    for path in [paths.run_dir("dead"), *paths.run_dir("dead").rglob("*")]:
        os.utime(path, (then, then))


@pytest.mark.guards("Nothing of others is deleted")
def test_a_run_of_another_host_is_collected_only_after_its_age(paths: HistoryPaths) -> None:
    """That its lock looks free says nothing: many shared file systems keep locks to each host."""
    _owner(paths, host="node-a", boot="of node a")
    assert collect_garbage(paths) == Collected()
    _unchanged_for(paths, liveness.DEAD_AFTER_S - 3600)
    assert collect_garbage(paths) == Collected()
    # A file that is being written for so long keeps the run alive.
    _unchanged_for(paths, liveness.DEAD_AFTER_S + 3600)
    (half,) = paths.step_dir("dead", 1).glob(".rank-00001*")
    os.utime(half)
    assert collect_garbage(paths) == Collected()
    _unchanged_for(paths, liveness.DEAD_AFTER_S + 3600)
    assert collect_garbage(paths) == Collected([BEGUN])


def _analyze(paths: HistoryPaths) -> None:
    assert analyze_part(paths, "dead", StatisticsFile(0, 0, 2))


def _compact(paths: HistoryPaths) -> None:
    done = compact_run(History.open(paths.root), "dead", [0], key_every=2)
    assert [one.ref.step for one in done.steps] == [0]


def _prune(paths: HistoryPaths) -> None:
    assert remove(History.open(paths.root), [CheckpointRef("dead", 0)], force=True, dry_run=False).removed


def _collect(paths: HistoryPaths) -> None:
    (paths.step_dir("dead", 1) / "notes.txt").write_bytes(b"of somebody else")
    os.utime(paths.step_dir("dead", 1) / "notes.txt", (0, 0))
    assert collect_garbage(paths).checkpoints == [BEGUN]


def _evaluate(paths: HistoryPaths) -> None:
    with LaterMetrics(paths) as metrics:
        metrics.record(CheckpointRef("dead", 0), {"val_loss": 0.5})


@pytest.mark.parametrize("edit", [_analyze, _compact, _prune, _collect, _evaluate])
def test_what_is_done_to_a_dead_run_does_not_make_it_look_alive(
    paths: HistoryPaths, edit: Callable[[HistoryPaths], None]
) -> None:
    """After a reboot nobody knows any more that its locks were free: its age decides."""
    _owner(paths, boot="an earlier one")
    _unchanged_for(paths, time.clock_gettime(time.CLOCK_BOOTTIME) + 60)
    edit(paths)
    with locked_run(paths, "dead") as locked:
        assert locked


@pytest.mark.guards("Nothing of others is deleted")
@pytest.mark.parametrize(
    "written",
    [
        "journal/rank-00001-00000000.parquet",
        "journal/.rank-00001-00000001.parquet.0123abcd.tmp",
        "fingerprints/rank-00000-00000000.parquet",
        "redo/.rank-00000-000000000000-to-000000000000.redo.0123abcd.tmp",
        "steps/000000000000/commit.json",
        "steps/000000000001/rank-00000.safetensors",
        "steps/000000000002",
        "locks/rank-00001.lock",
        "run.json",
    ],
)
def test_whatever_a_session_writes_keeps_its_run_alive(paths: HistoryPaths, written: str) -> None:
    _owner(paths, host="node-a", boot="of node a")
    path = paths.run_dir("dead") / written
    if written == "steps/000000000002":
        path.mkdir()
    elif not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    _unchanged_for(paths, liveness.DEAD_AFTER_S + 3600)
    with locked_run(paths, "dead") as locked:
        assert locked
    os.utime(path)
    with locked_run(paths, "dead") as locked:
        assert not locked


def test_locks_that_hosts_have_proved_to_share_decide_at_once(paths: HistoryPaths) -> None:
    _owner(paths, host="node-a", boot="of node a", shared=True)
    assert collect_garbage(paths) == Collected([BEGUN])


def test_a_run_of_an_earlier_boot_is_dead_when_nothing_has_changed_since(
    paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "DEAD_AFTER_S", float("inf"))
    _owner(paths, boot="an earlier one")
    # Something has changed in this boot: there is another host with this one's name.
    assert collect_garbage(paths) == Collected()
    _unchanged_for(paths, time.clock_gettime(time.CLOCK_BOOTTIME) + 60)
    assert collect_garbage(paths) == Collected([BEGUN])


@pytest.mark.parametrize("content", [b"", b"{", None])
def test_a_lock_that_does_not_say_where_it_was_taken_does_not_decide(
    paths: HistoryPaths, content: bytes | None
) -> None:
    if content is None:
        paths.lock("dead", 1).unlink()
    else:
        paths.lock("dead", 1).write_bytes(content)
    assert collect_garbage(paths) == Collected()
    _unchanged_for(paths, liveness.DEAD_AFTER_S + 3600)
    assert collect_garbage(paths) == Collected([BEGUN])
