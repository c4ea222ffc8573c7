"""Of two who would change a dead run, only one does, whatever became of its lock files."""

import os
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.access.locked_run import locked_run
from catalog.compaction.compact import compact_run
from catalog.errors import SetupError
from catalog.history import History


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_two_exclude_each_other_in_a_run_without_lock_files(tmp_path: Path) -> None:
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"1234"}), register=False)
    history = History.open(tmp_path / "h")
    history.paths.lock("run-a", 0).unlink()
    for path in history.paths.run_dir("run-a").rglob("*"):
        os.utime(path, (0, 0))
    with locked_run(history.paths, "run-a") as first, locked_run(history.paths, "run-a") as second:
        assert (first, second) == (True, False)
        with pytest.raises(SetupError, match="is being written, or may be"):
            compact_run(history, "run-a", [0], key_every=2)
    assert [one.ref.step for one in compact_run(history, "run-a", [0], key_every=2).steps] == [0]
