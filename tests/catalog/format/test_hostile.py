"""Files of an untrusted history that lead outside, do not fit or contradict each other are refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import ALIGN, LAYOUT, Piece, Run, data_file_bytes, pieces_of

import native
from catalog.disk import json_file
from catalog.errors import CorruptError, FormatError, HistoryError, NotFoundError
from catalog.format.extents import extent_table
from catalog.format.manifest import Manifest, bytes_in, encode_manifest
from catalog.history import History
from catalog.paths import HistoryPaths, data_file
from catalog.records import CheckpointRef, Extent
from catalog.verify import verify

REF = CheckpointRef("run-a", 10)


@pytest.fixture
def root(history: Path) -> Path:
    with Run(history, world_size=2) as run:
        for step in (0, 10):
            run.checkpoint(
                step,
                [Piece("w", b"ab", shape=(4,), placement="partitioned")],
                [Piece("w", b"cd", shape=(4,), start=2, placement="partitioned")],
                register=False,
            )
    return history


def _forge(root: Path, rank: int, extents: list[Extent]) -> None:
    """Replace a manifest and the marker's record of it: all checksums fit, and only the content is hostile."""
    paths = HistoryPaths(root)
    path = paths.manifest("run-a", 10, rank)
    created = History.open(root).query("SELECT created FROM checkpoints WHERE step = 10").to_pylist()[0]["created"]
    table = extent_table(extents)
    nbytes = bytes_in(data_file("run-a", 10, rank), table)
    data = encode_manifest(Manifest("run-a", 10, rank, 2, LAYOUT, created, data_bytes=nbytes, table=table))
    path.write_bytes(data)
    _forge_marker(root, **{"manifest_checksum": native.checksum(data).hex()}, rank=rank)


def _forge_marker(root: Path, *, rank: int, **change: Any) -> None:
    path = HistoryPaths(root).marker("run-a", 10)
    content = json.loads(path.read_bytes())
    del content["checksum"]
    content["parts"][rank] |= change
    path.write_bytes(json_file.encode(content))


def _rows(root: Path, rank: int) -> list[Extent]:
    file = data_file("run-a", 10, rank)
    return [extent for extent in History.open(root).extents(REF) if extent.file == file]


def _refused(root: Path, match: str) -> HistoryError:
    """Assert that `extents` refuses the history and that `verify` reports it."""
    with pytest.raises(FormatError, match=match) as caught:
        History.open(root).extents(REF)
    assert verify(History.open(root), [REF])
    return caught.value


def test_a_forged_manifest_without_a_change_is_accepted(root: Path) -> None:
    _forge(root, 1, _rows(root, 1))
    assert len(History.open(root).extents(REF)) == 6
    assert verify(History.open(root)) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "I8"}, "fragments disagree"),
        ({"shape": (2, 2)}, "fragments disagree"),
        ({"placement": "replicated"}, "fragments disagree"),
        ({"placement": "rank_local"}, "fragments disagree"),
        ({"start": 1}, "overlaps"),
    ],
    ids=str,
)
def test_fragments_that_contradict_each_other_are_refused(root: Path, change: dict[str, Any], match: str) -> None:
    rows = [replace(row, **change) if row.name == "w" else row for row in _rows(root, 1)]
    _forge(root, 1, rows)
    assert "w" in str(_refused(root, match))


@pytest.mark.parametrize(
    ("file", "offset", "match"),
    [
        (data_file("run-a", 99, 0), ALIGN, "missing"),
        (data_file("run-b", 0, 0), ALIGN, "missing"),
        (data_file("run-a", 0, 0), 1 << 20, "reach byte"),
    ],
)
def test_a_reference_to_bytes_that_are_not_there_is_refused(root: Path, file: str, offset: int, match: str) -> None:
    stray = Extent("x", "model", "U8", (2,), 0, 2, file, offset, 2, native.checksum(b"ab"), "replicated")
    _forge(root, 1, [*_rows(root, 1), stray])
    assert "rank-00000.safetensors" in str(_refused(root, match))


def test_a_reference_to_an_earlier_checkpoint_is_followed_and_verified(root: Path) -> None:
    stray = Extent(
        "x", "model", "U8", (2,), 0, 2, data_file("run-a", 0, 0), ALIGN, 2, native.checksum(b"ab"), "replicated"
    )
    _forge(root, 1, [*_rows(root, 1), stray])
    assert stray in History.open(root).extents(REF)
    assert verify(History.open(root)) == []
    _forge(root, 1, [*_rows(root, 1), replace(stray, checksum=bytes(16))])
    (problem,) = verify(History.open(root), [REF])
    assert (problem.file, problem.field) == (data_file("run-a", 0, 0), "checksum of model/x")


def test_a_data_file_that_is_a_link_out_of_the_history_is_refused(root: Path, tmp_path: Path) -> None:
    path = HistoryPaths(root).data("run-a", 10, 0)
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    _refused(root, "leads out of the history")


def test_a_header_that_differs_from_the_manifest_is_found(root: Path) -> None:
    """Both have valid checksums, yet another safetensors reader would read the wrong tensor."""
    content, extents = data_file_bytes(
        [Piece("v", b"cd", shape=(4,), start=2, placement="partitioned")], step=10, rank=1
    )
    renamed = [replace(row, name="w") if row.name == "v" else row for row in extents]
    HistoryPaths(root).data("run-a", 10, 1).write_bytes(content)
    _forge(root, 1, renamed)
    (problem,) = verify(History.open(root), [REF])
    assert (problem.file, problem.field) == (data_file("run-a", 10, 1), "header")
    assert "model/v" in problem.message


def test_a_header_of_another_part_is_found(root: Path) -> None:
    content, extents = data_file_bytes(
        [Piece("w", b"cd", shape=(4,), start=2, placement="partitioned")], step=10, rank=7
    )  # fmt: skip
    HistoryPaths(root).data("run-a", 10, 1).write_bytes(content)
    _forge(root, 1, [replace(row, file=data_file("run-a", 10, 1)) for row in extents])
    (problem,) = verify(History.open(root), [REF])
    assert "__metadata__.rank" in problem.message


def test_a_marker_that_names_another_manifest_is_refused(root: Path) -> None:
    _forge_marker(root, rank=1, manifest_checksum="0" * 32)
    assert isinstance(_refused(root, "manifest_checksum"), CorruptError)


def test_a_manifest_in_the_place_of_another_rank_is_refused(root: Path) -> None:
    paths = HistoryPaths(root)
    data = paths.manifest("run-a", 10, 0).read_bytes()
    paths.manifest("run-a", 10, 1).write_bytes(data)
    _forge_marker(root, rank=1, manifest_checksum=native.checksum(data).hex())
    with pytest.raises(HistoryError, match="field rank"):
        History.open(root).extents(REF)
    assert verify(History.open(root), [REF])


def test_a_folder_with_an_unlawful_name_is_not_a_run(root: Path) -> None:
    (root / "runs" / "a b").mkdir()
    (root / "runs" / "a b" / "run.json").write_bytes((root / "runs" / "run-a" / "run.json").read_bytes())
    history = History.open(root)
    assert [facts.run for facts in history.runs()] == ["run-a"]
    assert history.query("SELECT run FROM runs").to_pylist() == [{"run": "run-a"}]
    assert [problem.file for problem in verify(history)] == ["runs/a b"]


def test_a_run_json_in_the_folder_of_another_run_is_refused(root: Path) -> None:
    (root / "runs" / "run-c").mkdir()
    (root / "runs" / "run-c" / "run.json").write_bytes((root / "runs" / "run-a" / "run.json").read_bytes())
    with pytest.raises(FormatError, match="field run"):
        History.open(root).run_facts("run-c")
    assert "runs/run-c/run.json" in {problem.file for problem in verify(History.open(root))}


def test_names_of_tensors_are_only_data(history: Path) -> None:
    """Markup, quotes, newlines and path separators stay data wherever they appear."""
    names = [
        "<script>",
        "'; DROP TABLE tensors; --",
        "../../etc/passwd",
        'a"b',
        "a\nb",
        "\u202egnp.exe",
        "[0:1]",
        " ",
        "\0",
    ]
    with Run(history) as run:
        run.checkpoint(0, pieces_of({name: name.encode() for name in names}))
    opened = History.open(history)
    rows = opened.query("SELECT name FROM tensors").to_pylist()
    assert sorted(row["name"] for row in rows) == sorted(names)
    assert {extent.name for extent in opened.extents(CheckpointRef("run-a", 0), kinds=["model"])} == set(names)
    assert verify(opened) == []


def test_a_newer_format_is_refused_with_what_to_do(history: Path) -> None:
    with Run(history):
        pass
    path = history / "history.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_bytes(json_file.encode(content | {"format": 2}))
    with pytest.raises(FormatError, match="newer release"):
        History.open(history)


def test_an_uncommitted_step_has_no_extents(root: Path) -> None:
    with pytest.raises(NotFoundError, match="not committed"):
        History.open(root).extents(CheckpointRef("run-a", 11))
