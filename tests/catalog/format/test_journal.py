"""Flushed journal rows are durable and immutable, and a failed flush loses no row."""

import datetime
import math
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_helpers import flip_bit

from catalog.disk.checked_parquet import encode_checked
from catalog.errors import CorruptError, FormatError
from catalog.format.journal import JOURNAL_SCHEMA, Journal, is_segment, read_segment, segments


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
    path.write_bytes(encode_checked(JOURNAL_SCHEMA.empty_table(), metadata=facts))
    with pytest.raises(FormatError, match=r"field (dshistory\.journal|run)"):
        read_segment(path, run="run-a")


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a-00000000.parquet"
    table = pa.table({"kind": ["metric"]}, schema=pa.schema([pa.field("kind", pa.string(), nullable=False)]))
    path.write_bytes(encode_checked(table, metadata={"dshistory.journal": "1", "run": "run-a"}))
    with pytest.raises(FormatError, match="columns"):
        read_segment(path, run="run-a")
