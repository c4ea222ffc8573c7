"""Fingerprints come back as written, from segments that are read by themselves, and a wrong one is refused by name."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from catalog_helpers import Piece, Run, flip_bit

from catalog.disk.checked_parquet import encode_checked
from catalog.errors import FormatError
from catalog.format.fingerprints import (
    FINGERPRINTS,
    FingerprintWriter,
    TensorTable,
    TracedTensor,
    read_fingerprints,
)
from catalog.format.segments import segments
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.read.fingerprints import fingerprinted_ranks, fingerprints_of
from catalog.verify import verify

FACTS = {"dshistory.fingerprints": "1", "run": "run-a"}


def table_of(count: int) -> TensorTable:
    return TensorTable(
        tuple(TracedTensor("model", f"é.{i}", "F32", (4, 2), 2, 6, "replicated", "sampled") for i in range(count))
    )


def digests_of(step: int, count: int) -> bytes:
    return np.arange(step, step + count, dtype=np.uint64).tobytes()


@pytest.fixture
def written(history: Path) -> History:
    """Return a history of one run, with a checkpoint, and fingerprints of ten steps of two ranks."""
    with Run(history, run="run-a", world_size=2) as run:
        run.checkpoint(
            0, [Piece("w", b"ab", placement="rank_local")], [Piece("w", b"cd", placement="rank_local")], register=False
        )
        for rank in (0, 1):
            writer = FingerprintWriter(run.writers[rank].paths, run="run-a", rank=rank)
            writer.publish(
                [(step, table_of(2 if step < 3 else 5), digests_of(step, 2 if step < 3 else 5)) for step in range(6)]
            )
            writer.publish([(step, table_of(5), digests_of(step, 5)) for step in range(6, 10)])
            if rank == 0:
                writer.close()
    return History.open(history)


def test_they_come_back_as_written(written: History) -> None:
    assert fingerprinted_ranks(written.paths, "run-a") == [0, 1]
    for rank in (0, 1):
        found = list(fingerprints_of(written.paths, "run-a", rank))
        assert [(one.step, one.rank) for one in found] == [(step, rank) for step in range(10)]
        for one in found:
            assert one.table.tensors == table_of(2 if one.step < 3 else 5).tensors
            assert one.digests.tobytes() == digests_of(one.step, len(one.table.tensors))
    assert [one.step for one in fingerprints_of(written.paths, "run-a", 1, after=2, until=7)] == [3, 4, 5, 6, 7]
    assert found[0].table.tensors[0].label == "model 'é.0'[2:8]"
    assert verify(written) == []


def test_segments_are_merged_and_each_is_read_by_itself(written: History) -> None:
    names = [path.name for path in segments(written.paths.fingerprints_dir("run-a"))]
    assert names == [
        "rank-00000-00000000-to-00000001.parquet",
        "rank-00001-00000000.parquet",
        "rank-00001-00000001.parquet",
    ]
    for path in segments(written.paths.fingerprints_dir("run-a")):
        assert all(one.table.tensors for one in read_fingerprints(path, run="run-a"))


@pytest.mark.guards("Damage is found and named")
def test_a_damaged_or_missing_segment_of_fingerprints_is_named(written: History) -> None:
    folder = written.paths.fingerprints_dir("run-a")
    flip_bit(folder / "rank-00001-00000001.parquet", offset=60)
    (problem,) = verify(written)
    assert problem.file == "runs/run-a/fingerprints/rank-00001-00000001.parquet"
    assert [one.step for one in fingerprints_of(written.paths, "run-a", 1)] == list(range(6)), "the others are read"
    (folder / "rank-00001-00000000.parquet").unlink()
    assert {one.file.rsplit("/")[-1] for one in verify(written)} == {
        "rank-00001-00000000.parquet",
        "rank-00001-00000001.parquet",
    }


def test_what_a_killed_writer_left_is_collected(written: History) -> None:
    left = written.paths.fingerprints_dir("run-a") / ".rank-00000-00000002.parquet.0123abcd.tmp"
    left.write_bytes(b"half")
    collect_garbage(written.paths)
    assert not left.exists()
    assert len(list(segments(left.parent))) == 3


def row(**changes: object) -> dict[str, object]:
    table = table_of(2)
    return {"step": 1, "rank": 0, "table": table.id, "tensors": table.text, "digests": bytes(16)} | changes


def described(text: str) -> dict[str, object]:
    from native import checksum

    return row(tensors=text, table=checksum(text.encode()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (row(tensors=None), "does not describe the tensors"),
        (row(table=bytes(16)), "does not describe the tensors"),
        (row(digests=bytes(17)), "'digests' has 17 bytes for 2 tensors"),
        (row(step=-1), "there is no step -1"),
        (row(step=10**12), "there is no step"),
        (row(rank=-1), "of rank -1"),
        (described("[" * 100_000), "is not JSON"),
        (described("{}"), "is no list"),
        (described("[1, 2]"), "1 describes no tensor"),
        (described('[["model", "w", "F32", [-1], 0, 1, "replicated", "whole"]]'), "describes no tensor"),
        (described('[["model", "w", "F32", 7, 0, 1, "replicated", "whole"]]'), "describes no tensor"),
        (described('[["model", "w", "F32", [1], 0, true, "replicated", "whole"]]'), "describes no tensor"),
        (described('[["model", "w", "F32", [1], 0, 1, "replicated", []]]'), "describes no tensor"),
    ],
)
def test_a_segment_that_contradicts_itself_is_refused(tmp_path: Path, wrong: dict[str, object], message: str) -> None:
    path = tmp_path / "rank-00000-00000000.parquet"
    path.write_bytes(encode_checked(pa.Table.from_pylist([wrong], schema=FINGERPRINTS.schema), metadata=FACTS))
    with pytest.raises(FormatError, match=r"rank-00000-00000000\.parquet") as caught:
        list(read_fingerprints(path, run="run-a"))
    assert message in str(caught.value)


def test_a_segment_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000-00000000.parquet"
    path.write_bytes(
        encode_checked(FINGERPRINTS.schema.empty_table(), metadata={"dshistory.journal": "1", "run": "run-a"})
    )
    with pytest.raises(FormatError, match=r"field dshistory\.fingerprints"):
        list(read_fingerprints(path, run="run-a"))
