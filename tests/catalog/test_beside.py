"""What is merged or removed while others read is no problem, and what is lost meanwhile is one that verify names.

Whatever happens meanwhile happens between the listing of a folder and the reading of its files, where it matters.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import Run, meanwhile, pieces_of
from redo_helpers import add

import catalog.index.registered
import catalog.read.checkpoint
import catalog.verify
from catalog.errors import NotFoundError
from catalog.format.journal import Journal
from catalog.format.redo_segment import RedoTensor, RedoWrites, redo_segments
from catalog.format.redo_writer import RedoFileWriter
from catalog.format.statistics_file import StatisticsFile
from catalog.history import History
from catalog.index.ingest import RowCache
from catalog.read.checkpoint import read_checkpoint
from catalog.records import CheckpointRef
from catalog.retention.prune import remove
from catalog.statistics.compute import analyze_part
from catalog.verify import verify

PIECES = pieces_of({"w": b"1234"})
STEPS = range(3)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run of three checkpoints that is not closed: its journal has a segment for each."""
    found = Run(tmp_path / "h")
    for step in STEPS:
        found.checkpoint(step, PIECES, loss=1.0)
    return found


def journal_of(run: Run) -> list[str]:
    return sorted(path.name for path in run.writers[0].paths.journal_dir("run-a").iterdir())


@pytest.mark.guards("Damage is found and named")
def test_journal_segments_that_their_writer_merges_are_no_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(journal_of(run)) == len(STEPS)
    happened = meanwhile(monkeypatch, catalog.verify, "read_segment", run.close)
    assert verify(History.open(run.root)) == []
    assert happened
    assert journal_of(run) == ["rank-00000-00000000-to-00000002.parquet"]


def test_a_listing_without_the_merged_segment_and_without_its_parts_is_no_problem(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that changes while it is listed may be listed so."""
    folder = run.writers[0].paths.journal_dir("run-a")
    run.close()
    later = Journal(folder, run="run-a", writer="rank-00000", rank=0)
    later.metric(3, "loss", 1.0)
    later.flush()
    assert journal_of(run) == ["rank-00000-00000000-to-00000002.parquet", "rank-00000-00000003.parquet"]
    listed = catalog.verify.listings

    def listings(of: Path) -> Any:
        for number, names in enumerate(listed(of)):
            yield [name for name in names if number or "-to-" not in name]

    monkeypatch.setattr(catalog.verify, "listings", listings)
    assert verify(History.open(run.root)) == []


@pytest.mark.guards("Damage is found and named")
def test_a_journal_segment_that_is_lost_meanwhile_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = run.writers[0].paths.journal_dir("run-a") / journal_of(run)[1]
    happened = meanwhile(monkeypatch, catalog.verify, "read_segment", lost.unlink)
    (problem,) = verify(History.open(run.root))
    assert (problem.file, problem.message) == (
        f"runs/run-a/journal/{lost.name}",
        f"missing, as are all segments up to {journal_of(run)[1]}",
    )
    assert happened


@pytest.mark.guards("Damage is found and named")
def test_a_folder_that_names_files_that_are_never_there_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, *, run: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(catalog.verify, "read_segment", absent)
    (problem,) = verify(History.open(run.root))
    assert (problem.file, problem.message) == (
        "runs/run-a/journal",
        "names files that are not there, each time that it is listed",
    )


@pytest.mark.parametrize("reader", ["read_statistics", "read_redo_segment", "pinned"])
def test_checkpoints_that_are_removed_are_no_problem(run: Run, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    """With all that belongs to them."""
    history, paths = History.open(run.root), run.writers[0].paths
    for step in STEPS:
        assert analyze_part(paths, "run-a", StatisticsFile(step, 0, 1))
    redo = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, RedoWrites((("w",),)))
    add(redo, RedoTensor("gradient", "w", "F32", (2, 3)), bytes(24))
    redo.end_step(1, groups=[{"lr": 0.1}], broken=None)
    redo.publish()
    run.close()

    def removes() -> None:
        remove(history, [CheckpointRef("run-a", step) for step in STEPS], force=True, dry_run=False)

    happened = meanwhile(monkeypatch, catalog.verify, reader, removes)
    assert verify(history) == []
    assert happened
    assert (history.steps("run-a"), list(paths.statistics_dir("run-a").iterdir())) == ([], [])
    assert redo_segments(paths, "run-a") == []


def test_a_registered_checkpoint_that_is_removed_has_not_lost_its_marker(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.close()
    history = History.open(run.root)

    def removes() -> None:
        remove(history, [CheckpointRef("run-a", 2)], force=True, dry_run=False)

    happened = meanwhile(monkeypatch, catalog.index.registered, "steps", removes)
    assert verify(history) == []
    assert happened


def test_a_checkpoint_that_is_removed_while_its_manifests_are_read_is_not_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.close()
    history = History.open(run.root)
    ref = CheckpointRef("run-a", 1)
    happened = meanwhile(
        monkeypatch,
        catalog.read.checkpoint,
        "read_bounded",
        lambda: remove(history, [ref], force=True, dry_run=False),
    )
    with pytest.raises(NotFoundError, match=r"checkpoint run-a:1 of .* was just removed"):
        read_checkpoint(history.paths, "run-a", 1)
    assert happened


def test_the_index_passes_over_a_checkpoint_that_is_removed_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run(tmp_path / "h") as run:
        for step in STEPS:
            run.checkpoint(step, PIECES, register=step == 0)
    history = History.open(run.root)
    folder = run.writers[0].paths.step_dir("run-a", 1)
    happened = meanwhile(monkeypatch, RowCache, "has", lambda: shutil.move(folder, tmp_path / "away"))
    steps = history.query("SELECT step FROM checkpoints ORDER BY step")["step"].to_pylist()
    assert happened
    assert steps == [0, 2]


def test_a_step_that_goes_while_the_states_are_asked_for_is_in_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History.open(run.root)
    run.writers[0].begin(7)
    folder = run.writers[0].paths.step_dir("run-a", 7)
    assert [ref.step for ref in history.checkpoints(state="pending")] == [7]
    happened = meanwhile(monkeypatch, History, "state", lambda: shutil.rmtree(folder))
    assert history.checkpoints(state="pending") == []
    assert happened
    run.close()
