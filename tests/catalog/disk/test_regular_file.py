"""Whatever is no regular file of a history is refused by name, and nothing waits for it."""

import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.disk.regular_file import check_folders, open_regular, read_at_most
from catalog.errors import FormatError, HistoryError
from catalog.history import History
from catalog.verify import verify


def _socket(path: Path) -> None:
    # The path of a socket has at most 108 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"{}")
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
    "a symbolic link": _link,
}


@pytest.mark.parametrize("kind", KINDS)
def test_anything_but_a_regular_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(FormatError, match=f"{path}: is {kind} "):
        open_regular(path)


def test_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_at_most(path, 5) == b"12345"
    with pytest.raises(FormatError, match="file: 5 bytes, where 4 are allowed"):
        read_at_most(path, 4)
    # Its size is 0 until it is read, as that of a file which somebody writes meanwhile.
    with pytest.raises(FormatError, match="/proc/self/status: grew while it was read"):
        read_at_most(Path("/proc/self/status"), 1 << 20)


def test_a_small_file_is_read_into_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    tracemalloc.start()
    try:
        assert len(read_at_most(path, 256 << 20)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_device_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="/dev/zero: is a device node"):
        open_regular(Path("/dev/zero"))


def test_a_regular_file_is_read_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"content"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_folders_are_real_below_the_root_which_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real/inner").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "real")
    root = tmp_path / "root"
    check_folders(root / "inner", root=root)
    check_folders(root / "missing/inner", root=root)
    (root / "link").symlink_to(root / "inner")
    with pytest.raises(FormatError, match="link: is a symbolic link"):
        check_folders(root / "link/deeper", root=root)


FILES = [
    "runs/run-a/run.json",
    "runs/run-a/steps/000000000001/commit.json",
    "runs/run-a/steps/000000000001/rank-00000.manifest.parquet",
    "runs/run-a/steps/000000000001/rank-00000.safetensors",
    "runs/run-a/journal/rank-00000-00000000.parquet",
    "runs/run-a/statistics/000000000001-00000-of-00001.parquet",
]


@pytest.mark.guards("Nothing is unpickled")
@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link"])
@pytest.mark.parametrize("file", FILES)
def test_a_history_with_such_a_file_is_read_and_the_file_is_named(tmp_path: Path, file: str, kind: str) -> None:
    with Run(tmp_path / "h") as run:
        run.checkpoint(1, pieces_of({"w": b"1234"}), register=False, loss=1.0)
    path = tmp_path / "h" / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    history = History.open(tmp_path / "h")
    problems = verify(history)
    assert file in {problem.file for problem in problems}
    assert any(kind in problem.message for problem in problems)
    damaged = history.query("SELECT detail FROM events WHERE name = 'damaged'").to_pylist()
    if not file.endswith("safetensors"):
        assert any(kind in row["detail"] for row in damaged)
    if "statistics" not in file and "journal" not in file and "run.json" not in file:
        with pytest.raises(HistoryError, match=kind):
            history.extents(history.resolve("run-a:1"))


@pytest.mark.parametrize("name", ["catalog.duckdb", "catalog.gate.lock", "catalog.room.lock"])
def test_a_fifo_instead_of_a_file_of_the_index_is_named(tmp_path: Path, name: str) -> None:
    with Run(tmp_path / "h") as run:
        run.checkpoint(1, pieces_of({"w": b"1234"}), register=False)
    os.mkfifo(tmp_path / "h" / name)
    with pytest.raises(FormatError, match=f"{name}: is a FIFO"):
        History.open(tmp_path / "h").query("SELECT 1 FROM checkpoints")


def test_a_fifo_instead_of_a_lock_is_named(tmp_path: Path) -> None:
    with Run(tmp_path / "h") as run:
        run.part(1, 0, pieces_of({"w": b"1234"}))
    lock = run.writers[0].paths.lock("run-a", 0)
    lock.unlink()
    os.mkfifo(lock)
    history = History.open(tmp_path / "h")
    assert history.state("run-a", 1) == "incomplete"
    (row,) = history.query("SELECT detail FROM events WHERE name = 'damaged'").to_pylist()
    assert "rank-00000.lock: is a FIFO" in row["detail"]
    with pytest.raises(FormatError, match="is a FIFO"):
        history.held("run-a")


@pytest.mark.parametrize("folder", ["runs", "runs/run-a", "runs/run-a/steps", "runs/run-a/steps/000000000001"])
def test_a_link_instead_of_a_folder_is_named(tmp_path: Path, folder: str) -> None:
    with Run(tmp_path / "h") as run:
        run.checkpoint(1, pieces_of({"w": b"1234"}), register=False)
    path = tmp_path / "h" / folder
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    history = History.open(tmp_path / "h")
    assert folder in {problem.file for problem in verify(history)}
    with pytest.raises(FormatError, match=f"{path}: is a symbolic link"):
        history.resolve("run-a:1")


def test_the_history_itself_may_be_behind_a_link(tmp_path: Path) -> None:
    with Run(tmp_path / "h") as run:
        run.checkpoint(1, pieces_of({"w": b"1234"}))
    (tmp_path / "link").symlink_to(tmp_path / "h")
    with Run(tmp_path / "link", "run-b") as run:
        run.checkpoint(1, pieces_of({"w": b"1234"}))
    history = History.open(tmp_path / "link")
    assert len(history.checkpoints()) == 2
    assert verify(history) == []
