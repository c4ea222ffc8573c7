"""`prune`, `remove` and `usage` as a user meets them: in Python, on the command line, and with a terminal that asks."""

import io
import json
import os
import pty
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from catalog_helpers import Run
from retention_helpers import commit, model_extents

from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.commands.cli import main
from dshistory.explorer import Explorer


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    """Return a history of four steps, the last of which refers to the first."""
    with Run(tmp_path / "h") as run:
        for step in range(3):
            commit(run, step, {"w": b"%d" % step, "frozen": b"never changes"}, loss=1.0 + step)
        frozen = model_extents(History.open(tmp_path / "h"), CheckpointRef("run-a", 0))["frozen"]
        commit(run, 3, {"w": b"3"}, refer={"frozen": frozen}, loss=9.0)
    return Explorer.open(tmp_path / "h")


def test_a_removed_step_says_that_it_was_removed_when_and_why(explorer: Explorer) -> None:
    when = r"was removed on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    explorer.prune("last 1", dry_run=False)
    for ref in (1, "1", "run-a:1", CheckpointRef("run-a", 1)):
        with pytest.raises(NotFoundError, match=rf"step 1 of run run-a .* {when} \(.+\): the nearest are 0 and 3"):
            explorer.show(ref)
    with pytest.raises(NotFoundError, match=r"step 7 was not captured in .*: the nearest is 3"):
        explorer.show(7)


def test_a_step_that_another_run_lost_was_not_captured_here(explorer: Explorer) -> None:
    explorer.prune("last 1", dry_run=False)
    root = explorer.history.root
    with Run(root, run="run-b", parent=("run-a", 0)) as run:
        commit(run, 2, {"w": b"2"}, loss=1.0)
    with pytest.raises(NotFoundError, match="step 1 was not captured"):
        Explorer.open(root).show("run-b:1")


def test_prune_tells_first_and_then_does_it(explorer: Explorer) -> None:
    table = explorer.prune("last 1")
    assert table.columns == ("run", "step", "frees", "reason")
    assert table["step"].to_pylist() == [1, 2]
    assert table.kept["reason"].to_pylist() == ["run-a:3 refers to its bytes", "the newest"]
    assert table.note.endswith("nothing was removed yet: dry_run=False does it")
    assert len(explorer.log()) == 4
    before = explorer.usage()["bytes"]
    done = explorer.prune("last 1", dry_run=False)
    assert done["step"].to_pylist() == [1, 2]
    assert explorer.log()["step"].to_pylist() == [0, 3]
    assert "2 more were removed" in explorer.log().note
    freed = sum(done["frees"].to_pylist())
    index = sum(path.stat().st_blocks * 512 for path in explorer.root.glob("catalog.duckdb*"))
    assert before - freed - 8192 < explorer.usage()["bytes"] < before + index


def test_usage_says_what_a_removal_frees(explorer: Explorer) -> None:
    report = explorer.usage()
    rows = list(report.tables["checkpoints"])
    assert [(row["needed_by"], row["needs"]) for row in rows] == [(1, []), (0, []), (0, []), (0, [0])]
    assert [row["frees"] > 0 for row in rows] == [False, True, True, True]
    assert rows[1]["frees"] == sum(
        path.stat().st_blocks * 512 for path in explorer.history.paths.step_dir("run-a", 1).iterdir()
    )
    kinds = {row["kind"]: row for row in report.tables["kinds"]}
    assert (kinds["model"]["bytes"], kinds["model"]["referred"]) == (4 + 3 * 13, 13)
    assert report.tables["runs"][0]["bytes"] == sum(row["bytes"] for row in rows)
    parts = sum(row["bytes"] + row["redo"] + row["other"] for row in report.tables["runs"])
    assert report["bytes"] == parts + report["index"]
    assert explorer.usage(run="run-a")["bytes"] == parts


def test_the_command_line_removes_nothing_without_yes(explorer: Explorer) -> None:
    root = str(explorer.root)
    assert "2 checkpoints would be removed" in _output("prune", root, "last 1")
    assert "--yes does it" in _output("prune", root, "last 1")
    assert "1 checkpoint would be removed" in _output("remove", root, "1")
    assert len(explorer.log()) == 4
    assert json.loads(_output("usage", root, "--json"))["checkpoints"]
    assert "1 checkpoint removed" in _output("remove", root, "1", "--yes")
    assert "1 checkpoint removed" in _output("prune", root, "last 1", "--yes")
    assert explorer.log()["step"].to_pylist() == [0, 3]


@pytest.mark.parametrize(("answer", "left"), [("", 4), ("y", 3)])
def test_a_terminal_is_asked(explorer: Explorer, answer: str, left: int) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "dshistory", "remove", str(explorer.root), "1"]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        os.write(terminal, f"{answer}\n".encode())
        shown = b""
        while chunk := _read(terminal):
            shown += chunk
    os.close(terminal)
    assert process.returncode == 0
    assert b"remove: do it? [y/N]" in shown
    assert len(explorer.history.steps("run-a")) == left


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        # EIO: the child has closed its end.
        return b""


def _output(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert main(list(words)) == 0
    return out.getvalue()
