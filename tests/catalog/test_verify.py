"""Verify finds a flipped bit in any byte of any published file, and names the file."""

from pathlib import Path

import pytest
from catalog_helpers import ALIGN, Piece, Run, flip_bit, pieces_of
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.data_files.check_data import BATCH_BYTES
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import Problem, verify


def _history(root: Path) -> Path:
    """Make a history with every kind of file: two ranks, two checkpoints and a child run."""
    with Run(root, world_size=2) as run:
        for step in (0, 10):
            halves = [
                Piece("w", bytes([step, step + 1]), dtype="U8", shape=(4,), start=start, placement="partitioned")
                for start in (0, 2)
            ]
            objects = Piece("rng", b'{"seed":1}', kind="object", placement="rank_local")
            run.checkpoint(step, [halves[0], objects], [halves[1], objects], loss=1.0 + step)
        run.writers[0].journal.tag("good", 10)
    with Run(root, run="run-b", parent=("run-a", 10)) as child:
        child.checkpoint(0, pieces_of({"w": b"1234"}), loss=0.5)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _history(tmp_path_factory.mktemp("verify") / "history")


def _published(root: Path) -> list[Path]:
    """Return every file that belongs to the history, without the index and the locks."""
    return sorted(
        path for path in root.rglob("*") if path.is_file() and path.suffix in (".json", ".parquet", ".safetensors")
    )


def _problems(root: Path) -> list[Problem]:
    return verify(History.open(root))


def test_a_whole_history_has_no_problem_and_every_byte_is_read(root: Path) -> None:
    read: list[int] = []
    assert verify(History.open(root), progress=read.append) == []
    assert sum(read) == sum(path.stat().st_size for path in _published(root) if path.suffix == ".safetensors")


def test_there_is_a_file_of_every_kind(root: Path) -> None:
    names = {path.name.split("-")[0] for path in _published(root)}
    assert names == {"history.json", "run.json", "commit.json", "rank"}
    assert len(_published(root)) > 15


@pytest.mark.guards("Damage is found and named")
@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(root: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(_published(root)[1:]), label="file")
    offset = data.draw(st.integers(0, path.stat().st_size - 1), label="offset")
    _found_and_put_back(root, path, offset, bit=data.draw(st.integers(0, 7), label="bit"))


def _found_and_put_back(root: Path, path: Path, offset: int, *, bit: int) -> None:
    flip_bit(path, offset=offset, bit=bit)
    try:
        problems = _problems(root)
    finally:
        flip_bit(path, offset=offset, bit=bit)
    assert str(path.relative_to(root)) in {problem.file for problem in problems}, (path, offset, bit, problems)


def test_a_flipped_bit_in_history_json_is_found(root: Path) -> None:
    history = History.open(root)
    for offset in range(0, (root / "history.json").stat().st_size, 5):
        flip_bit(root / "history.json", offset=offset)
        try:
            assert "history.json" in {problem.file for problem in verify(history)}
        finally:
            flip_bit(root / "history.json", offset=offset)


@pytest.mark.guards("Damage is found and named")
@pytest.mark.parametrize(
    ("offset", "field"),
    [
        (8, "header"),
        (ALIGN, "checksum of model/w"),
        (ALIGN + 2, "checksum of object/rng"),
        (-1, "checksum of pad/__pad__.tail"),
    ],
)
def test_the_damaged_extent_is_named(root: Path, offset: int, field: str) -> None:
    path = root / "runs/run-a/steps/000000000010/rank-00001.safetensors"
    flip_bit(path, offset=offset)
    try:
        assert field in {problem.field for problem in _problems(root)}
    finally:
        flip_bit(path, offset=offset)


@pytest.mark.parametrize(
    "pattern", ["runs/run-a/run.json", "runs/*/steps/*/rank-00000.safetensors", "runs/*/steps/*/*.parquet"]
)
def test_a_missing_file_is_named(tmp_path: Path, pattern: str) -> None:
    root = _history(tmp_path / "history")
    path = sorted(root.glob(pattern))[0]
    path.unlink()
    assert str(path.relative_to(root)) in {problem.file for problem in _problems(root)}


def test_a_missing_journal_segment_is_named(tmp_path: Path) -> None:
    root = tmp_path / "history"
    with Run(root) as run:
        for step in range(3):
            run.checkpoint(step, pieces_of({"w": b"1234"}), loss=1.0)
        first = sorted((root / "runs/run-a/journal").iterdir())[0]
        first.unlink()
        assert [problem.file for problem in _problems(root)] == [str(first.relative_to(root))]


@pytest.mark.guards("Damage is found and named")
@pytest.mark.parametrize("change", [-1, 1, -ALIGN])
def test_a_cut_or_lengthened_data_file_is_named(tmp_path: Path, change: int) -> None:
    root = _history(tmp_path / "history")
    path = root / "runs/run-b/steps/000000000000/rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    problems = _problems(root)
    assert {problem.file for problem in problems} == {str(path.relative_to(root))}
    assert "data_bytes" in {problem.field for problem in problems}


def test_only_the_checkpoints_asked_for_are_read(root: Path) -> None:
    path = root / "runs/run-a/steps/000000000010/rank-00000.safetensors"
    history = History.open(root)
    flip_bit(path, offset=ALIGN)
    try:
        assert verify(history, [CheckpointRef("run-a", 0), CheckpointRef("run-b", 0)]) == []
        assert len(verify(history, [CheckpointRef("run-a", 10)])) == 1
    finally:
        flip_bit(path, offset=ALIGN)


def test_fragments_that_leave_a_gap_are_named(tmp_path: Path) -> None:
    with Run(tmp_path / "history") as run:
        run.checkpoint(0, [Piece("w", b"12", shape=(4,), start=0, placement="partitioned")])
    (problem,) = _problems(tmp_path / "history")
    assert problem.field == "model/w"
    assert "2 of 4" in problem.message


def test_an_uncommitted_step_is_not_a_problem(tmp_path: Path) -> None:
    with Run(tmp_path / "history", world_size=2) as run:
        run.part(0, 0, pieces_of({"w": b"1234"}))
        assert not run.writers[0].try_commit(0)
    assert _problems(tmp_path / "history") == []


def test_extents_larger_than_a_batch_are_read(tmp_path: Path) -> None:
    with Run(tmp_path / "history") as run:
        run.checkpoint(0, pieces_of({"small": b"1", "large": bytes(BATCH_BYTES + 5), "last": b"2"}))
    read: list[int] = []
    assert verify(History.open(tmp_path / "history"), progress=read.append) == []
    assert len(read) == 3
