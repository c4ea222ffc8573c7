"""The golden history of format 1 stays readable, with DSHistory and with tools that know nothing of it."""

import datetime
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from golden_history import BF16, RNG, W, write
from places import GOLDEN
from safetensors import safe_open

import native
from catalog.format.header import encode_header, entries_json, read_header
from catalog.format.marker import build_marker, encode_marker
from catalog.format.segments import segments
from catalog.history import History
from catalog.records import CheckpointRef, Extent
from catalog.verify import verify

A, B = "20261121-101502-000001", "20261121-111502-000002"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return a copy, since a query may create an index beside it."""
    root = tmp_path_factory.mktemp("golden") / "history"
    shutil.copytree(GOLDEN, root)
    return History.open(root)


def _bytes(history: History, extent: Extent) -> bytes:
    with (history.root / extent.file).open("rb") as file:
        file.seek(extent.offset)
        data = file.read(extent.nbytes)
    assert native.checksum(data) == extent.checksum
    return data


def test_it_verifies(golden: History) -> None:
    assert verify(golden) == []


def test_runs_and_lineage(golden: History) -> None:
    first, second = golden.runs()
    assert (first.run, first.created, first.world_size, first.parent_run) == (A, "2026-11-21T10:15:02+00:00", 2, None)
    assert first.facts == {"zero_stage": 1, "backend": "posix"}
    assert (second.run, second.world_size, second.parent_run, second.parent_step) == (B, 1, A, 50)
    assert str(golden.resolve(0)) == f"{A}:0"
    assert str(golden.resolve("latest")) == f"{B}:50"
    assert str(golden.resolve("good")) == f"{A}:50"
    assert str(golden.resolve("best")) == f"{A}:0"


def test_every_tensor_has_its_bytes(golden: History) -> None:
    extents = golden.extents(CheckpointRef(A, 50))
    found = {(extent.kind, extent.name, extent.start): extent for extent in extents if extent.placement != "rank_local"}
    assert found.keys() == {
        ("exp_avg", "layer.w", 0), ("exp_avg", "layer.w", 2), ("model", "head", 0), ("model", "layer.w", 0),
        ("model", "layer.w", 2),
    }  # fmt: skip
    assert _bytes(golden, found["model", "layer.w", 0]) + _bytes(golden, found["model", "layer.w", 2]) == W
    head = found["model", "head", 0]
    assert (head.dtype, head.shape, head.aliases, _bytes(golden, head)) == ("BF16", (3, 1), ("embed",), BF16)
    rng = [_bytes(golden, extent) for extent in extents if extent.kind == "object"]
    assert rng == [RNG, RNG + b" "]
    assert {extent.shape for extent in extents if extent.name == "empty"} == {(0, 4)}


TABLES = [
    "SELECT run, step, state, world_size, layout, tensors, bytes, new_bytes FROM checkpoints",
    "SELECT * FROM metrics",
    "SELECT run, step, rank, name, detail FROM events",
    "SELECT name, run, step FROM tags",
    "SELECT run, step, kind, name, dtype, shape, numel, nbytes, placement, fragments, changed FROM tensors",
]


def test_the_tables_have_the_recorded_rows(golden: History) -> None:
    found = {sql: golden.query(f"{sql} ORDER BY ALL").to_pylist() for sql in TABLES}
    assert json.loads(json.dumps(found)) == json.loads((GOLDEN.parent / "format-1.tables.json").read_text())


def test_the_time_of_a_checkpoint_is_in_its_manifests(golden: History) -> None:
    (row,) = golden.query("SELECT min(created) AS created FROM checkpoints").to_pylist()
    assert row["created"].date() == datetime.date(2026, 11, 21)


def test_any_safetensors_and_parquet_reader_opens_it() -> None:
    folder = GOLDEN / "runs" / A / "steps" / "000000000050"
    with safe_open(folder / "rank-00001.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "dshistory-1", "run": A, "step": "50", "rank": "1"}
        assert file.get_tensor("model/layer.w[2:4]").tobytes() == W[8:]
    assert pq.read_table(folder / "rank-00001.manifest.parquet").num_rows == 6
    assert pq.read_table(next(segments(GOLDEN / "runs" / A / "journal"))).num_rows == 1


def test_writing_the_same_content_gives_the_same_bytes(golden: History) -> None:
    """Headers and markers are pure functions of their content."""
    folder = golden.paths.step_dir(A, 50)
    for rank in range(2):
        path = folder / f"rank-{rank:05d}.safetensors"
        header = read_header(path)
        encoded = encode_header([entries_json(header.entries)], metadata=header.metadata, data_start=header.data_start)
        assert encoded == path.read_bytes()[: header.data_start]
    marker = build_marker(golden.paths, run=A, step=50, world_size=2, layout_hash="layout-1")
    assert encode_marker(marker) == (folder / "commit.json").read_bytes()


def test_a_history_written_today_reads_the_same(golden: History, tmp_path: Path) -> None:
    write(tmp_path / "today")
    today = History.open(tmp_path / "today")
    for sql in TABLES:
        assert today.query(f"{sql} ORDER BY ALL").to_pylist() == golden.query(f"{sql} ORDER BY ALL").to_pylist()
    for ref in golden.checkpoints():
        assert today.extents(ref) == golden.extents(ref)
