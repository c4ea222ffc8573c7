"""Journals whose writers merge their segments: every row is found exactly once, whatever the index has of them."""

import threading
from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.format.journal import Journal
from catalog.format.segments import segments
from catalog.history import History
from catalog.index import index
from catalog.index.database import database


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "h")


def _events(history: History) -> list[int]:
    return [row["step"] for row in history.query("SELECT step FROM events ORDER BY step").to_pylist()]


def _flush(journal: Journal, steps: range) -> None:
    for step in steps:
        journal.event("seen", step)
        journal.flush()


def _ingested(history: History) -> list[str]:
    with database(history.paths).reading(patience_s=5.0) as connection:
        return sorted(row[0] for row in connection.execute("SELECT segment FROM idx.segments").fetchall())


@pytest.mark.parametrize("registered", [0, 3, 5, 9])
def test_the_index_takes_from_a_merged_segment_what_it_lacks(run: Run, registered: int) -> None:
    """Of nine rows the index has some when the writer ends and merges all."""
    journal = run.writers[0].journal
    history = History.open(run.root)
    _flush(journal, range(registered))
    index.register(history.paths, patience_s=10.0)
    _flush(journal, range(registered, 9))
    run.close()
    assert [path.name for path in segments(history.paths.journal_dir("run-a"))] == [
        "rank-00000-00000000-to-00000008.parquet"
    ]
    assert _events(history) == list(range(9))
    index.register(history.paths, patience_s=10.0)
    assert _events(history) == list(range(9))
    assert _ingested(history) == ["rank-00000-00000000-to-00000008.parquet"]
    assert history.reindex() == 0
    assert _events(history) == list(range(9))


def test_a_merged_segment_beside_those_it_replaces_counts_once(run: Run) -> None:
    """The writer was killed after it had published the merged segment and before it had removed the others."""
    journal = run.writers[0].journal
    history = History.open(run.root)
    folder = history.paths.journal_dir("run-a")
    _flush(journal, range(4))
    index.register(history.paths, patience_s=10.0)
    kept = {path: path.read_bytes() for path in segments(folder)}
    _flush(journal, range(4, 6))
    kept |= {path: path.read_bytes() for path in segments(folder)}
    run.close()
    for path, content in kept.items():
        path.write_bytes(content)
    assert len(list(segments(folder))) == 7
    assert _events(history) == list(range(6))
    index.register(history.paths, patience_s=10.0)
    assert _events(history) == list(range(6))
    for path in kept:
        path.unlink()
    assert _events(history) == list(range(6))
    # A client of a network file system may still see the old listing.
    merged = next(segments(folder))
    content = merged.read_bytes()
    for path, old in kept.items():
        path.write_bytes(old)
    merged.unlink()
    assert _events(history) == list(range(6))
    merged.write_bytes(content)


def test_who_reads_while_segments_are_merged_finds_every_row_once(run: Run) -> None:
    journal = run.writers[0].journal
    history = History.open(run.root)
    run.checkpoint(0, pieces_of({"w": b"1234"}))
    written = 0
    failures: list[BaseException] = []

    def write() -> None:
        nonlocal written
        try:
            for step in range(70):
                _flush(journal, range(step, step + 1))
                written = step + 1
                if step % 23 == 0:
                    index.register(history.paths, patience_s=10.0)
            run.close()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        before = written
        found = _events(history)
        assert found == list(range(len(found)))
        assert before <= len(found) <= written + 1
    writer.join()
    assert failures == []
    assert _events(history) == list(range(70))
