"""The commit marker is a pure function of the manifests, is written once, and refuses foreign content."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import LAYOUT, Piece, Run, data_file_bytes, pieces_of

from catalog.disk import json_file
from catalog.errors import FormatError, MismatchError, NotFoundError
from catalog.format.extents import extent_table
from catalog.format.marker import build_marker, encode_marker, read_marker
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.records import CheckpointRef
from catalog.run_writer import RunWriter

PIECES = pieces_of({"w": b"12345678"})


def _halves(step: int) -> list[list[Piece]]:
    return [[Piece("w", bytes([step, rank]), shape=(4,), start=2 * rank, placement="partitioned")] for rank in range(2)]


def test_a_checkpoint_exists_only_with_all_parts(history: Path) -> None:
    with Run(history, world_size=2) as run:
        run.part(0, 0, _halves(0)[0])
        assert not run.writers[0].try_commit(0)
        assert History.open(history).checkpoints() == []
        run.part(0, 1, _halves(0)[1])
        assert run.writers[1].try_commit(0)
        assert History.open(history).checkpoints() == [CheckpointRef("run-a", 0)]


def test_any_rank_writes_the_same_marker_and_only_once(history: Path) -> None:
    with Run(history, world_size=2) as run:
        for rank in range(2):
            run.part(0, rank, _halves(0)[rank])
        paths = HistoryPaths(history)
        expected = encode_marker(build_marker(paths, run="run-a", step=0, world_size=2, layout_hash=LAYOUT))
        start = threading.Barrier(2)
        committed: list[bool] = []

        def commit(writer: RunWriter) -> None:
            start.wait()
            committed.append(writer.try_commit(0))

        threads = [threading.Thread(target=commit, args=(writer,)) for writer in run.writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        marker = paths.marker("run-a", 0)
        inode = marker.stat().st_ino
        assert committed == [True, True]
        assert run.writers[0].try_commit(0)
        assert (marker.read_bytes(), marker.stat().st_ino) == (expected, inode)
        assert [path.name for path in marker.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "other", [{"run": "run-b"}, {"step": 8}, {"world_size": 3}, {"layout": "layout-2"}, {"rank": 1}], ids=str
)
def test_a_manifest_of_another_session_is_never_committed(history: Path, other: dict[str, Any]) -> None:
    """A part left behind by another attempt cannot become part of this one."""
    with Run(history, world_size=2) as run:
        facts = {"run": "run-a", "step": 7, "rank": 0, "world_size": 2, "layout": LAYOUT} | other
        with Run(history, run="run-b"):
            pass
        stray = RunWriter(history, run="run-b", rank=5, world_size=facts["world_size"], layout_hash=facts["layout"])
        stray.run, stray.rank = facts["run"], facts["rank"]
        content, extents = data_file_bytes(PIECES, run=facts["run"], step=facts["step"], rank=facts["rank"])
        tmp = stray.begin(facts["step"])
        tmp.write_bytes(content)
        stray.publish_part(facts["step"], data_tmp=tmp, extents=extent_table(extents))
        paths = HistoryPaths(history)
        written = paths.manifest(facts["run"], facts["step"], facts["rank"])
        paths.step_dir("run-a", 7).mkdir(exist_ok=True)
        written.rename(paths.manifest("run-a", 7, 0))
        stray.close()
        run.part(7, 1, PIECES)
        with pytest.raises(MismatchError, match=f"field {next(iter(other))}:"):
            run.writers[1].try_commit(7)
        assert not paths.marker("run-a", 7).exists()


def test_a_data_file_shorter_than_its_manifest_is_never_committed(history: Path) -> None:
    with Run(history) as run:
        run.part(0, 0, PIECES)
        data = HistoryPaths(history).data("run-a", 0, 0)
        data.write_bytes(data.read_bytes()[:-1])
        with pytest.raises(MismatchError, match="8191"):
            run.writers[0].try_commit(0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format"),
        ({"run": "run-b"}, "run"),
        ({"step": 1}, "step"),
        ({"step": True}, "step"),
        ({"world_size": 2}, "parts"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 10**9}, "world_size"),
        ({"layout": 3}, "layout"),
        ({"parts": []}, "parts"),
        ({"parts": {}}, "parts"),
        ({"parts": [7]}, "parts"),
        ({"extra": 1}, "fields"),
        ({"parts.rank": 1}, "rank"),
        ({"parts.manifest": "../../../etc/passwd"}, "manifest"),
        ({"parts.data": "/etc/passwd"}, "data"),
        ({"parts.data_bytes": -1}, "data_bytes"),
        ({"parts.data_bytes": "8"}, "data_bytes"),
        ({"parts.manifest_checksum": 1}, "manifest_checksum"),
        ({"parts.extra": 1}, "parts"),
    ],
    ids=str,
)
def test_hostile_markers_are_refused(history: Path, change: dict[str, Any], match: str) -> None:
    with Run(history) as run:
        run.checkpoint(0, PIECES)
    paths = HistoryPaths(history)
    content = json.loads(paths.marker("run-a", 0).read_bytes())
    del content["checksum"]
    for key, value in change.items():
        if key.startswith("parts."):
            content["parts"][0][key.removeprefix("parts.")] = value
        else:
            content[key] = value
    paths.marker("run-a", 0).unlink()
    paths.marker("run-a", 0).write_bytes(json_file.encode(content))
    with pytest.raises(FormatError, match=match) as caught:
        read_marker(paths, "run-a", 0)
    assert "commit.json" in str(caught.value)


def test_a_step_without_a_marker_is_not_a_checkpoint(history: Path) -> None:
    with Run(history):
        pass
    with pytest.raises(NotFoundError, match="run-a:3"):
        read_marker(HistoryPaths(history), "run-a", 3)
