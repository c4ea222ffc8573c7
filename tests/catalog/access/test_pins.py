"""A pin keeps a checkpoint there, a dead reader has none, and what is removed can't be pinned."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.access.pins import alone_with, is_pinned, pin, pinned
from catalog.disk.locks import free_lock
from catalog.errors import NotFoundError
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef

REF = CheckpointRef("run-a", 0)


@pytest.fixture
def paths(tmp_path: Path) -> HistoryPaths:
    """Return a history with one checkpoint."""
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"1234"}), register=False)
    return HistoryPaths(tmp_path / "h")


def test_readers_share_and_who_removes_waits_for_none(paths: HistoryPaths) -> None:
    with pinned(paths, REF), pinned(paths, REF):
        assert is_pinned(paths, REF)
        with alone_with(paths, REF) as alone:
            assert not alone
    assert not is_pinned(paths, REF)


def test_nobody_begins_to_read_what_is_being_removed(paths: HistoryPaths) -> None:
    with alone_with(paths, REF) as alone:
        assert alone
        with pytest.raises(NotFoundError, match="was removed"), pinned(paths, REF):
            pass
    with pinned(paths, REF):
        pass


def test_who_waited_for_the_lock_of_a_removed_checkpoint_is_told(paths: HistoryPaths) -> None:
    folder = paths.step_dir("run-a", 0)
    with alone_with(paths, REF):
        folder.rename(folder.with_name(".000000000000.0123abcd.tmp"))
    for attempt in (pinned, alone_with):
        with pytest.raises(NotFoundError, match="run-a:0"), attempt(paths, REF):
            pass
    # Another one has its name now.
    shutil.copytree(folder.with_name(".000000000000.0123abcd.tmp"), folder)
    with pinned(paths, REF):
        pass


def test_a_reader_that_is_killed_has_no_pin(paths: HistoryPaths) -> None:
    ready, waits = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        pin(paths, REF)
        os.write(ready[1], b"1")
        os.read(waits[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert is_pinned(paths, REF)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for descriptor in (*ready, *waits):
        os.close(descriptor)
    assert not is_pinned(paths, REF)


def test_a_forked_child_does_not_keep_its_parents_pin(paths: HistoryPaths) -> None:
    held = pin(paths, REF)
    assert held is not None
    waits = os.pipe()
    child = os.fork()
    if not child:
        os.read(waits[0], 1)
        os._exit(0)
    free_lock(held)
    assert not is_pinned(paths, REF)
    os.write(waits[1], b"1")
    os.waitpid(child, 0)
    for descriptor in waits:
        os.close(descriptor)


def test_a_history_that_may_only_be_read_is_pinned_too(paths: HistoryPaths) -> None:
    marker = paths.marker("run-a", 0)
    marker.chmod(0o444)
    marker.parent.chmod(0o555)
    with pinned(paths, REF):
        pass
    marker.parent.chmod(0o755)
