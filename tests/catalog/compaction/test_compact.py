"""A compacted history gives the very bytes of before, and an interrupted compaction loses none."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from catalog_helpers import Run, flip_bit, meanwhile
from packed_helpers import RUN, STEPS, all_bytes, compacted, make_history, packed_files_of, ref
from retention_helpers import cut_off

from catalog.access.pins import pinned
from catalog.compaction import pack, spans
from catalog.compaction.compact import compact_run
from catalog.data_files import check_data
from catalog.data_files.stored_bytes import Buffer, Piece, ReadBuffer
from catalog.encoding.planes import packed
from catalog.errors import SetupError
from catalog.format.marker import read_marker
from catalog.format.packed_file import read_packed_file
from catalog.gc import collect_garbage
from catalog.history import History
from catalog.paths import data_file, packed_file
from catalog.read.checkpoint import read_part
from catalog.retention.facts import bytes_on_disk
from catalog.verify import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "h"
    make_history(root)
    return root


@pytest.fixture
def history(made: Path, tmp_path: Path) -> History:
    root = tmp_path / "h"
    shutil.copytree(made, root)
    return History.open(root)


def data_files(history: History) -> list[Path]:
    return sorted(history.root.glob("runs/*/steps/*/*.safetensors"))


def test_every_byte_is_there_and_takes_less(history: History) -> None:
    before, taken = all_bytes(history), bytes_on_disk(history.paths.steps_dir(RUN))
    done = compacted(history)
    assert done.left == {}
    assert [(one.ref.step, one.base) for one in done.steps] == [
        (0, None), (10, 0), (20, 0), (30, None), (40, 30), (50, 30),
    ]  # fmt: skip
    assert data_files(history) == []
    assert len(packed_files_of(history)) == 2 * len(STEPS)
    assert all_bytes(history) == before
    assert verify(history) == []
    assert bytes_on_disk(history.paths.steps_dir(RUN)) < 0.6 * taken
    for one in done.steps:
        assert one.packed_bytes < one.raw_bytes


def test_a_second_compaction_finds_nothing_to_do(history: History) -> None:
    compacted(history)
    files = {path: path.stat().st_mtime_ns for path in packed_files_of(history)}
    done = compacted(history, key_every=2)
    assert done.steps == []
    assert done.left == {}
    assert {path: path.stat().st_mtime_ns for path in packed_files_of(history)} == files


def test_compactions_of_some_steps_at_a_time_keep_chains_of_one_link(history: History) -> None:
    before = all_bytes(history)
    assert [one.base for one in compacted(history, steps=range(20, 30)).steps] == [None]
    assert [one.base for one in compacted(history, steps=range(30, 50)).steps] == [20, 20]
    assert [one.base for one in compacted(history, steps=STEPS).steps] == [None, 0, None]
    assert all_bytes(history) == before
    assert verify(history) == []


@pytest.mark.guards("A checkpoint exists whole or not at all")
def test_a_compaction_that_is_cut_off_anywhere_loses_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    before = all_bytes(make_history(made, steps=range(0, 30, 10), elements=500))
    after = 0
    while True:
        root = tmp_path / f"h{after}"
        shutil.copytree(made, root)
        history = History.open(root)
        with cut_off(after) as cut:
            compacted(history)
        assert all_bytes(history) == before, after
        assert verify(history) == [], after
        collect_garbage(history.paths)
        compacted(history)
        assert data_files(history) == [], after
        assert all_bytes(history) == before, after
        assert verify(history) == [], after
        assert [path for path in root.rglob("*.tmp")] == [], after
        shutil.rmtree(root)
        if not cut.happened:
            break
        after += 1
    assert after == len(["open", "rename", "remove"]) * 2 * 3


def test_a_run_that_is_being_written_is_left(tmp_path: Path) -> None:
    history = make_history(tmp_path / "h", steps=range(0, 20, 10), elements=10)
    with Run(history.root, "run-b") as run:
        run.checkpoint(0, [])
        with pytest.raises(SetupError, match="run run-b: is being written"):
            compact_run(history, "run-b", [0], key_every=2)


def test_what_a_reader_has_open_stays_and_the_next_compaction_finishes_it(history: History) -> None:
    before = all_bytes(history)
    with pinned(history.paths, ref(20)):
        done = compacted(history)
    assert list(done.left) == [ref(20)]
    assert "a reader has it open" in done.left[ref(20)]
    assert (history.root / data_file(RUN, 20, 0)).exists()
    assert all_bytes(history) == before
    assert [one.ref for one in compacted(history).steps] == [ref(20)]
    assert data_files(history) == []
    assert all_bytes(history) == before


def test_a_damaged_data_file_is_never_packed(history: History) -> None:
    path = history.root / data_file(RUN, 0, 1)
    flip_bit(path, offset=path.stat().st_size // 2)
    done = compacted(history)
    assert list(done.left) == [ref(0)]
    assert "damaged, and therefore not packed" in done.left[ref(0)]
    assert path.exists()
    assert [one.base for one in done.steps] == [None, 10, 10, None, 40]


def test_nothing_more_is_packed_against_a_damaged_key_frame(history: History) -> None:
    before = all_bytes(history)
    compacted(history, steps=range(0, 20))
    damaged = history.root / packed_file(data_file(RUN, 0, 1))
    flip_bit(damaged, offset=damaged.stat().st_size // 2)
    done = compacted(history)
    assert list(done.left) == [ref(0)]
    assert data_file(RUN, 0, 1) in done.left[ref(0)]
    assert "nothing more is packed against it" in done.left[ref(0)]
    assert [(one.ref.step, one.base) for one in done.steps] == [(20, None), (30, 20), (40, 20), (50, None)]
    assert data_files(history) == []
    assert all_bytes(history, steps=range(20, 60, 10)) == {key: data for key, data in before.items() if key[0] >= 20}
    assert compacted(history).steps == []


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let an extent be larger than a batch; return the list of how many bytes are read at a time."""
    read_at_once: list[int] = []
    place = ReadBuffer.place

    def placed(self: ReadBuffer, pieces: Sequence[Piece]) -> tuple[list[Buffer], list[int]]:
        read_at_once.append(sum(piece.nbytes for piece in pieces))
        return place(self, pieces)

    monkeypatch.setattr(ReadBuffer, "place", placed)
    monkeypatch.setattr(spans, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(spans, "_MOST_BYTES", 4 << 10)
    monkeypatch.setattr(pack, "_READ_BACK_BYTES", 1 << 10)
    return read_at_once


def test_an_extent_that_is_larger_than_a_batch_is_packed_in_parts(history: History, small_batches: list[int]) -> None:
    before = all_bytes(history)
    done = compacted(history, steps=range(0, 20))
    assert done.left == {}
    assert max(small_batches) == 4 << 10
    assert [one.base for one in done.steps] == [None, 0]
    image = read_packed_file(history.root / packed_file(data_file(RUN, 10, 0)), file=data_file(RUN, 10, 0))
    assert max(block.nbytes for block in image.blocks()) == 1 << 10
    assert all_bytes(history) == before
    assert verify(history) == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_damage_in_any_part_of_a_large_extent_is_found(history: History, place: float) -> None:
    large = next(one for one in history.extents(ref(0)) if one.name == "F64.weight")
    assert large.nbytes > 4 << 10
    path = history.root / large.file
    flip_bit(path, offset=large.offset + int(place * (large.nbytes - 1)))
    done = compacted(history, steps=range(0, 20))
    assert "'F64.weight'" in done.left[ref(0)]
    assert "damaged, and therefore not packed" in done.left[ref(0)]
    assert [one.base for one in done.steps] == [None]
    assert path.exists()


def test_an_image_that_is_damaged_beside_its_data_file_is_made_anew(history: History) -> None:
    before = all_bytes(history)
    saved = history.root / data_file(RUN, 20, 0)
    content = saved.read_bytes()
    compacted(history)
    saved.write_bytes(content)
    image = history.root / packed_file(data_file(RUN, 20, 0))
    flip_bit(image, offset=100)
    assert verify(history) == []
    assert [one.ref for one in compacted(history).steps] == [ref(20)]
    assert verify(history) == []
    assert all_bytes(history) == before


@pytest.mark.guards("A packed checkpoint is the checkpoint")
@pytest.mark.parametrize("place", [20, -40], ids=["a block", "the table"])
def test_what_the_disk_has_not_kept_never_takes_the_place_of_a_data_file(
    history: History, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    before = all_bytes(history)
    sync = os.fsync

    def keep_other_bytes(descriptor: int) -> None:
        """Sync as a disk would that has lost a bit on the way."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.suffix == ".tmp" and ".packed" in path.name:
            flip_bit(path, offset=place % path.stat().st_size)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", keep_other_bytes)
    done = compacted(history)
    monkeypatch.undo()
    assert done.steps == []
    assert len(done.left) == len(STEPS)
    assert packed_files_of(history) == []
    assert list(history.root.rglob("*.tmp")) == []
    assert all_bytes(history) == before


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_what_does_not_give_the_same_bytes_again_never_takes_the_place_of_a_data_file(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_bytes(history)

    def wrong(raw: memoryview, *, itemsize: int, base: memoryview | None = None) -> bytes:
        """Pack as a processor with a weak bit would."""
        changed = bytearray(raw)
        changed[-1] ^= 4
        return packed(memoryview(changed), itemsize=itemsize, base=base)

    monkeypatch.setattr(pack, "packed", wrong)
    done = compacted(history)
    assert done.steps == []
    assert all("check this machine's memory and disk" in reason for reason in done.left.values())
    assert packed_files_of(history) == []
    assert list(history.root.rglob("*.tmp")) == []
    assert all_bytes(history) == before


def test_a_header_is_found_in_the_image_that_takes_its_files_place_meanwhile(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = read_marker(history.paths, RUN, 10)
    manifest = read_part(history.paths, marker, marker.parts[0])
    happened = meanwhile(monkeypatch, check_data, "read_header", lambda: compacted(history))
    check_data.check_header(history.root, manifest)
    assert happened
    assert not (history.root / manifest.file).exists()
