"""Statistics do not depend on how the tensors are written, by one rank or four, and their files are checked."""

import pyarrow as pa
import pytest
import torch
from explorer_helpers import history_of, shares, whole

import native
from catalog.errors import FormatError
from catalog.format.statistics_file import (
    SCHEMA,
    StatisticsFile,
    merged_statistics,
    parse_name,
    publish_statistics,
    read_statistics,
)
from catalog.statistics.compute import BATCH_BYTES, buckets_of, sketch_key

TENSORS = {
    "a.weight": torch.randn(67, 113, generator=torch.Generator().manual_seed(2)),
    "b.weight": torch.randn(1001, generator=torch.Generator().manual_seed(3)).bfloat16(),
    "c.count": torch.arange(50),
    "d.scalar": torch.tensor(2.5),
    "e.empty": torch.empty(0, 4),
}
COUNTS = ("numel", "nan", "inf", "zeros", "min", "max", "exponents")


def test_one_rank_and_four_give_the_same(tmp_path):
    explorer = history_of(tmp_path, [whole(TENSORS)], shares(TENSORS, 4), world_sizes=(1, 4))
    assert len(explorer.analyze(quiet=True)) == 2
    one, four = (
        {row["name"]: row for row in explorer.sql("SELECT * FROM statistics WHERE step = $step", step=step)}
        for step in (10, 20)
    )
    assert one.keys() == four.keys() == TENSORS.keys()
    for name, row in one.items():
        assert [row[key] for key in COUNTS] == [four[name][key] for key in COUNTS], name
        for key in ("sum", "sum_of_squares"):
            assert row[key] == pytest.approx(four[name][key], rel=1e-12, abs=1e-12)
    sketches = [
        {row["name"]: row["sketch"] for row in explorer.sql("SELECT * FROM sketches WHERE step = $step", step=step)}
        for step in (10, 20)
    ]
    assert sketches[0].keys() == sketches[1].keys() == {"a.weight", "b.weight", "c.count"}
    for name, sketch in sketches[0].items():
        assert sketch == pytest.approx(sketches[1][name], rel=1e-6, abs=1e-9)


def test_statistics_of_some_ranks_alone_do_not_count(tmp_path):
    explorer = history_of(tmp_path, shares(TENSORS, 2), world_sizes=(2,))
    explorer.analyze(quiet=True)
    paths = explorer.history.paths
    run = explorer.history.current_run()
    (paths.statistics_dir(run) / StatisticsFile(10, 1, 2).name).unlink()
    paths.catalog_db.unlink()
    assert len(explorer.sql("SELECT * FROM statistics")) == 0
    assert len(explorer.analyze(quiet=True)) == 1
    assert len(explorer.sql("SELECT * FROM statistics")) == len(TENSORS)


def test_a_large_fragment_is_read_in_pieces(tmp_path):
    large = torch.randn(BATCH_BYTES // 4 + 12345, generator=torch.Generator().manual_seed(4))
    explorer = history_of(tmp_path, [whole({"w": large})], world_sizes=(1,))
    explorer.analyze(quiet=True)
    (row,) = explorer.sql("SELECT * FROM statistics")
    exact = large.double()
    assert row["numel"] == large.numel()
    assert (row["min"], row["max"]) == (float(exact.min()), float(exact.max()))
    assert row["norm"] == pytest.approx(float(exact.norm()), rel=1e-12)
    whole_at_once = native.statistics(large.numpy(), "F32", key=sketch_key("model", "w"))
    (sketched,) = explorer.sql("SELECT sketch FROM sketches")
    assert sketched["sketch"] == pytest.approx(whole_at_once.sketch.tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "numel", "buckets"),
    [
        ("model", 1 << 20, 256),
        ("exp_avg_sq", 300, 256),
        ("model", 255, 128),
        ("model", 16, 16),
        ("model", 15, 0),
        ("buffer", 999, 0),
        ("ema", 999, 256),
    ],
)
def test_a_sketch_is_never_longer_than_its_tensor(kind, numel, buckets):
    assert buckets_of(kind, numel) == buckets


def test_names_of_files():
    about = StatisticsFile(1200, 3, 8)
    assert about.name == "000000001200-00003-of-00008.parquet"
    assert parse_name(about.name) == about
    assert parse_name("000000001200-00003.parquet") is None


def test_a_file_of_another_part_is_refused(tmp_path):
    explorer = history_of(tmp_path, [whole(TENSORS)], world_sizes=(1,))
    paths, run = explorer.history.paths, explorer.history.current_run()
    path = publish_statistics(paths, run, StatisticsFile(10, 0, 1), SCHEMA.empty_table())
    moved = path.with_name(StatisticsFile(11, 0, 1).name)
    path.rename(moved)
    with pytest.raises(FormatError, match="field step: '10' where '11' belongs"):
        read_statistics(moved, run=run)


def test_tensors_local_to_ranks_have_the_statistics_of_rank_zero():
    row = {
        "name": "n", "kind": "buffer", "placement": "rank_local", "start": 0, "numel": 2, "checksum": bytes(16),
        "nan": 0, "inf": 0, "zeros": 0, "min": 1.0, "max": 1.0, "sum": 2.0, "sum_of_squares": 2.0,
        "exponents": [0] * 64, "sketch": [],
    }  # fmt: skip
    parts = [pa.Table.from_pylist([{**row, "sum": float(rank)}], schema=SCHEMA) for rank in range(3)]
    (merged,) = merged_statistics(parts).to_pylist()
    assert merged["sum"] == 0.0
