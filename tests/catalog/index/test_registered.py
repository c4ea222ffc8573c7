"""What the index has registered does not vanish without a word."""

import shutil
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.gc import collect_garbage
from catalog.history import History
from catalog.index import index
from catalog.verify import verify
from dshistory.explorer import Explorer

PIECES = pieces_of({"w": b"1234"})


@pytest.fixture
def history(tmp_path: Path) -> History:
    """Return a history with two runs of two registered checkpoints each."""
    for name in ("run-a", "run-b"):
        with Run(tmp_path / "h", name) as run:
            for step in (0, 1):
                run.checkpoint(step, PIECES, loss=1.0)
        run.register(patience_s=10.0)
    return History.open(tmp_path / "h")


def _said(history: History) -> tuple[dict[str, str], str]:
    """Return the problems that `verify` finds by file, and the note of the log, after another registration."""
    index.register(history.paths, patience_s=10.0)
    return _problems(history), str(Explorer.open(history.root).log().note)


def _problems(history: History) -> dict[str, str]:
    return {problem.file: problem.message for problem in verify(history)}


def test_nothing_is_said_of_a_whole_history(history: History) -> None:
    problems, note = _said(history)
    assert problems == {}
    assert "gone" not in note


@pytest.mark.guards("Damage is found and named")
def test_a_marker_that_is_gone_is_named_by_verify_and_log(history: History) -> None:
    marker = history.paths.marker("run-a", 1)
    marker.unlink()
    problems, note = _said(history)
    assert problems.keys() == {"runs/run-a/steps/000000000001/commit.json"}
    assert "registered, but its marker is gone" in problems["runs/run-a/steps/000000000001/commit.json"]
    assert "registered, but its marker is gone: run-a:1" in note
    states = Explorer.open(history.root).log(run="run-a")["state"].to_pylist()
    assert states == ["committed", "failed"]


def test_the_data_of_a_registered_checkpoint_is_not_collected(history: History) -> None:
    marker = history.paths.marker("run-a", 1)
    content = marker.read_bytes()
    marker.unlink()
    collected = collect_garbage(history.paths)
    assert collected.checkpoints == []
    assert "registered, but it is gone" in collected.kept[0]
    marker.write_bytes(content)
    assert verify(history) == []


def test_a_run_json_that_is_gone_is_named_and_the_run_is_back_with_it(history: History) -> None:
    path = history.paths.run_json("run-a")
    content = path.read_bytes()
    path.unlink()
    for folder in (history.paths.step_dir("run-a", 0), history.paths.step_dir("run-a", 1)):
        (folder / "commit.json").rename(folder / "away")
    problems, note = _said(history)
    assert "registered with 2 checkpoints, but it is gone" in problems["runs/run-a/run.json"]
    assert "run-a/run.json" in note
    (row,) = history.query("SELECT run, detail FROM events WHERE name = 'damaged'").to_pylist()
    assert row["run"] == "run-a"
    for folder in (history.paths.step_dir("run-a", 0), history.paths.step_dir("run-a", 1)):
        (folder / "away").rename(folder / "commit.json")
    path.write_bytes(content)
    assert _said(history)[0] == {}
    assert len(history.query("SELECT 1 FROM checkpoints").to_pylist()) == 4


def test_a_journal_segment_that_is_gone_is_named(history: History) -> None:
    (segment,) = history.paths.journal_dir("run-a").iterdir()
    segment.unlink()
    assert _said(history)[0].keys() == {history.paths.relative(segment)}


@pytest.mark.parametrize("removed", ["runs/run-a", "runs/run-a/steps/000000000001"])
def test_who_removes_a_whole_folder_means_it(history: History, removed: str) -> None:
    shutil.rmtree(history.root / removed)
    assert _problems(history) == {}, "before the next registration"
    problems, note = _said(history)
    assert problems == {}
    assert "gone" not in note


def test_reindex_forgets(history: History) -> None:
    history.paths.marker("run-a", 1).unlink()
    history.reindex()
    problems, note = _said(history)
    assert problems == {}
    assert "gone" not in note
