"""Flushed journal rows are durable and immutable, and a failed flush loses no row."""

import datetime
import math
import os
import sys
import threading
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_helpers import flip_bit

from catalog.disk import durable
from catalog.disk.checked_parquet import encode_checked
from catalog.errors import CorruptError, FormatError
from catalog.format import segments as segments_module
from catalog.format.journal import JOURNAL, Journal, read_segment
from catalog.format.segments import current_segments, is_segment, read_segment_rows, segments


def _journal(folder: Path) -> Journal:
    return Journal(folder, run="run-a", writer="rank-00003", rank=3)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    before = datetime.datetime.now(datetime.UTC)
    journal.metric(7, "loss", 1.5)
    journal.metric(7, "é", -math.inf)
    journal.metric(8, "loss", math.nan)
    journal.event("failed", None, reason="disk full", bytes=3)
    journal.tag("good", 7)
    journal.flush()
    (path,) = segments(tmp_path)
    assert path.name == "rank-00003-00000000.parquet"
    rows = read_segment(path, run="run-a").to_pylist()
    assert [(row["kind"], row["step"], row["name"], row["detail"]) for row in rows] == [
        ("metric", 7, "loss", None),
        ("metric", 7, "é", None),
        ("metric", 8, "loss", None),
        ("event", None, "failed", '{"bytes": 3, "reason": "disk full"}'),
        ("tag", 7, "good", None),
    ]
    assert [row["value"] for row in rows[:2]] == [1.5, -math.inf]
    assert math.isnan(rows[2]["value"])
    times = [row["time"] for row in rows]
    assert times == sorted(set(times))
    assert before <= times[0]
    assert {row["rank"] for row in rows} == {3}


def test_nothing_is_written_before_flush_and_an_empty_flush_writes_nothing(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    journal.flush()
    journal.metric(0, "loss", 1.0)
    assert list(tmp_path.iterdir()) == []
    journal.flush()
    journal.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00003-00000000.parquet"]


def test_segments_are_numbered_and_never_changed(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    contents = []
    for step in range(3):
        journal.metric(step, "loss", 1.0)
        journal.flush()
        contents.append([path.read_bytes() for path in segments(tmp_path)])
    assert contents[2][:2] == contents[1]
    assert contents[1][:1] == contents[0]


def test_a_writer_opened_again_replaces_nothing(tmp_path: Path) -> None:
    for step in range(3):
        journal = _journal(tmp_path)
        journal.metric(step, "loss", 1.0)
        journal.flush()
    assert [read_segment(path, run="run-a")["step"].to_pylist() for path in segments(tmp_path)] == [[0], [1], [2]]


def test_a_failed_flush_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = _journal(folder)
    journal.metric(0, "loss", 1.0)
    with pytest.raises(OSError, match="journal"):
        journal.flush()
    folder.mkdir()
    journal.metric(1, "loss", 2.0)
    journal.flush()
    (path,) = segments(folder)
    assert read_segment(path, run="run-a")["value"].to_pylist() == [1.0, 2.0]


def test_two_threads_lose_and_double_nothing(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    start = threading.Barrier(2)

    def write(first: int) -> None:
        start.wait()
        for step in range(first, 200, 2):
            journal.metric(step, "loss", float(step))
            if step % 40 < 2:
                journal.flush()

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.flush()
    values = [value for path in segments(tmp_path) for value in read_segment(path, run="run-a")["value"].to_pylist()]
    assert sorted(values) == [float(step) for step in range(200)]


def test_a_detail_that_is_not_json_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        _journal(tmp_path).event("failed", 1, reason=object())


@pytest.mark.parametrize(
    ("name", "lawful"),
    [
        ("rank-00003-00000000.parquet", True),
        (".rank-00003-00000000.parquet", False),
        ("rank-00003-00000000.parquet.tmp", False),
        ("rank-00003-1.parquet", False),
        ("x.parquet", False),
        ("README", False),
    ],
)
def test_only_published_names_are_segments(name: str, lawful: bool) -> None:
    assert is_segment(name) is lawful


def test_a_missing_folder_has_no_segments(tmp_path: Path) -> None:
    assert list(segments(tmp_path / "none")) == []


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    journal.metric(0, "loss", 1.0)
    journal.flush()
    (path,) = segments(tmp_path)
    for offset in range(path.stat().st_size):
        flip_bit(path, offset=offset, bit=offset % 8)
        with pytest.raises(FormatError, match="rank-00003"):
            read_segment(path, run="run-a")
        flip_bit(path, offset=offset, bit=offset % 8)
    assert read_segment(path, run="run-a").num_rows == 1


def test_damage_among_the_rows_is_reported_as_such(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    journal.metric(0, "loss", 1.0)
    journal.flush()
    (path,) = segments(tmp_path)
    flip_bit(path, offset=40)
    with pytest.raises(CorruptError, match="field checksum"):
        read_segment(path, run="run-a")


@pytest.mark.parametrize(
    "facts", [{"dshistory.journal": "2", "run": "run-a"}, {"dshistory.journal": "1", "run": "run-b"}, {}]
)
def test_a_segment_of_another_version_or_run_is_refused(tmp_path: Path, facts: dict[str, str]) -> None:
    path = tmp_path / "a-00000000.parquet"
    path.write_bytes(encode_checked(JOURNAL.schema.empty_table(), metadata=facts))
    with pytest.raises(FormatError, match=r"field (dshistory\.journal|run)"):
        read_segment(path, run="run-a")


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a-00000000.parquet"
    table = pa.table({"kind": ["metric"]}, schema=pa.schema([pa.field("kind", pa.string(), nullable=False)]))
    path.write_bytes(encode_checked(table, metadata={"dshistory.journal": "1", "run": "run-a"}))
    with pytest.raises(FormatError, match="columns"):
        read_segment(path, run="run-a")


def _values(folder: Path) -> list[float]:
    """Return what a reader finds who follows the rule that a merged segment replaces those that it spans."""
    current = current_segments(path.name for path in folder.iterdir())
    return [row for segment in current for row in read_segment(folder / segment.name, run="run-a")["value"].to_pylist()]


def test_a_writer_merges_its_segments_when_it_ends(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    for step in range(7):
        journal.metric(step, "loss", float(step))
        journal.flush()
    journal.metric(7, "loss", 7.0)
    journal.close()
    (path,) = segments(tmp_path)
    assert path.name == "rank-00003-00000000-to-00000007.parquet"
    assert _values(tmp_path) == [float(step) for step in range(8)]
    assert read_segment_rows(path, JOURNAL, run="run-a")[1] == [1] * 8
    again = _journal(tmp_path)
    again.metric(8, "loss", 8.0)
    again.close()
    assert [path.name for path in segments(tmp_path)][1:] == ["rank-00003-00000008.parquet"]
    assert _values(tmp_path) == [float(step) for step in range(9)]


def test_a_run_that_commits_often_keeps_few_segments(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    most = 0
    for step in range(280):
        journal.metric(step, "loss", float(step))
        journal.flush()
        most = max(most, len(list(tmp_path.iterdir())))
    assert most < 3 * 16 + 2
    assert _values(tmp_path) == [float(step) for step in range(280)]


def test_segments_that_are_large_are_not_merged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "_MAX_MERGED_BYTES", 1500)
    journal = _journal(tmp_path)
    for step in range(90):
        journal.metric(step, "loss", float(step))
        journal.flush()
    journal.close()
    assert 2 < len(list(segments(tmp_path))) < 45
    assert max(read_segment(path, run="run-a").nbytes for path in segments(tmp_path)) <= 1500
    assert _values(tmp_path) == [float(step) for step in range(90)]


def test_a_segment_that_cannot_be_read_stays_and_the_others_are_merged_later(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    for step in range(5):
        journal.metric(step, "loss", float(step))
        journal.flush()
    damaged = next(segments(tmp_path))
    flip_bit(damaged, offset=40)
    journal.close()
    assert damaged.exists()
    assert len(list(segments(tmp_path))) == 5


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_writer_killed_anywhere_while_it_merges_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """The writer dies before its first call to the file system, before the second, and so on to the last."""
    for kill in count(1):
        folder = tmp_path / f"{kill:03d}"
        folder.mkdir()
        if _killed_while_merging(folder, kill) == 0:
            break
        assert _values(folder) == [float(step) for step in range(4)]
        again = _journal(folder)
        again.metric(4, "loss", 4.0)
        again.close()
        assert _values(folder) == [float(step) for step in range(5)]
    assert kill > 8
    assert len(list(segments(folder))) == 1


def _killed_while_merging(folder: Path, kill: int) -> int:
    """Publish four segments, and merge them in a child that ends before its `kill`-th call; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            journal = _journal(folder)
            for step in range(4):
                journal.metric(step, "loss", float(step))
                journal.flush()
            left = kill

            def watch(event: str, arguments: tuple[object, ...]) -> None:
                nonlocal left
                if event in ("open", "os.rename", "os.remove", "os.link") and str(folder) in str(arguments[0]):
                    left -= 1
                    if left == 0:
                        os._exit(9)

            sys.addaudithook(watch)
            journal.close()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("failures", [1, 3])
def test_a_name_is_not_used_again_after_its_folder_could_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Whoever has read the segment that the folder may or may not keep must not find other rows under its name."""
    journal = _journal(tmp_path)
    seen: dict[str, bytes] = {}
    for step in range(failures):
        journal.metric(step, "loss", float(step))
        monkeypatch.setattr(durable, "sync_dir", _failing_sync)
        with pytest.raises(OSError, match="no sync"):
            journal.flush()
        monkeypatch.undo()
        seen |= {path.name: path.read_bytes() for path in segments(tmp_path)}
        assert _values(tmp_path) == [float(step) for step in range(step + 1)]
    journal.metric(failures, "loss", float(failures))
    journal.flush()
    assert not seen.keys() & {path.name for path in segments(tmp_path)}
    (path,) = segments(tmp_path)
    assert read_segment_rows(path, JOURNAL, run="run-a")[1] == [1] * (failures + 1)
    journal.flush()
    assert _values(tmp_path) == [float(step) for step in range(failures + 1)]


def _failing_sync(path: Path) -> None:
    raise OSError(5, "no sync", str(path))


@pytest.mark.parametrize(
    "counts", ["", "[]", "[[1, 2]]", "[[2, 2]]", "[[2, -1]]", "[[1e9, 1]]", "[[999999999, 0]]", "{}"]
)
def test_a_merged_segment_that_does_not_say_how_it_is_divided_is_refused(tmp_path: Path, counts: str) -> None:
    path = tmp_path / "a-00000000-to-00000001.parquet"
    facts = {"dshistory.journal": "1", "run": "run-a", "segments": counts}
    path.write_bytes(encode_checked(JOURNAL.schema.empty_table(), metadata=facts))
    with pytest.raises(FormatError, match="field segments"):
        read_segment(path, run="run-a")


@pytest.mark.parametrize(
    ("names", "current"),
    [
        (["a-00000000", "a-00000001"], ["a-00000000", "a-00000001"]),
        (
            ["a-00000000", "a-00000001", "a-00000000-to-00000001", "a-00000002"],
            ["a-00000000-to-00000001", "a-00000002"],
        ),
        (["a-00000000-to-00000003", "a-00000000-to-00000001", "b-00000000"], ["a-00000000-to-00000003", "b-00000000"]),
        (["a-00000001-to-00000001", "a-00000002-to-00000001", "a-00000000-to-99999999"], []),
        (["collector-12345678-00000000"], ["collector-12345678-00000000"]),
    ],
)
def test_a_merged_segment_replaces_those_that_it_spans(names: list[str], current: list[str]) -> None:
    found = [segment.name for segment in current_segments(f"{name}.parquet" for name in names)]
    assert found == [f"{name}.parquet" for name in current]
