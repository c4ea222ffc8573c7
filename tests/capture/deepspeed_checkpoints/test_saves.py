"""`latest` changes when every rank's files are durable, and only then; threads play two ranks over one folder."""

import errno
import json

import pytest
import torch

import native
from capture.deepspeed_checkpoints.file import FileWrite
from capture.deepspeed_checkpoints.saves import Save, Saves
from capture.deepspeed_checkpoints.tree import encode_tree


@pytest.fixture
def ranks():
    made = [Saves(rank=rank, world_size=2) for rank in range(2)]
    yield made
    for saves in made:
        saves.close()
        saves.close()


@pytest.fixture
def writer():
    made = native.Writer(backend="posix", budget_bytes=1 << 20, block_bytes=64 << 10)
    yield made
    made.close()


def begin(save, name, writer):
    save.tag_folder.mkdir(exist_ok=True)
    state = encode_tree({"x": torch.arange(5)}, known=(), pickle=False)
    return FileWrite.start(state, save.tag_folder / name, writer=writer, lazy_storages=frozenset(), align=4096)


def latest(folder):
    path = folder / "latest"
    return path.read_text() if path.exists() else None


def test_the_last_rank_to_finish_updates_latest(tmp_path, ranks, writer):
    for number, last in enumerate((0, 1)):
        save = [Save(str(number), tmp_path, f"tag{number}", moves_latest=True) for _ in ranks]
        for rank in (1 - last, last):
            assert latest(tmp_path) == (f"tag{number - 1}" if number else None)
            ranks[rank].add(save[rank], begin(save[rank], f"{rank}.pt", writer))
            ranks[rank].complete(save[rank])
            ranks[rank].wait()
        assert latest(tmp_path) == f"tag{number}"
    assert not [saves.take_failures() for saves in ranks if saves.take_failures()]


def test_receipts_of_an_older_save_under_the_same_tag_do_not_count(tmp_path, ranks):
    for saves in ranks:
        saves.complete(Save("1", tmp_path, "tag", moves_latest=True))
        saves.wait()
    (tmp_path / "latest").unlink()
    ranks[0].complete(Save("2", tmp_path, "tag", moves_latest=True))
    ranks[0].wait()
    assert latest(tmp_path) is None
    (tmp_path / "tag" / ".dshistory-00001.json").write_text("half a rec")
    ranks[0].complete(Save("3", tmp_path, "tag", moves_latest=True))
    ranks[0].wait()
    assert latest(tmp_path) is None
    ranks[1].complete(Save("3", tmp_path, "tag", moves_latest=True))
    ranks[1].wait()
    assert latest(tmp_path) == "tag"


def test_a_rank_that_fails_gives_no_receipt_and_reports_why_once(tmp_path, ranks, writer):
    save = [Save("1", tmp_path, "tag", moves_latest=True) for _ in ranks]
    full = native.Writer(
        backend="posix",
        budget_bytes=1 << 20,
        block_bytes=64 << 10,
        faults=native.Faults(fail_after=0, errno=errno.ENOSPC),
    )
    for name in ("a.pt", "b.pt"):
        ranks[1].add(save[1], begin(save[1], name, full))
    for rank, saves in enumerate(ranks):
        saves.complete(save[rank])
        saves.wait()
    assert latest(tmp_path) is None
    (failure,) = ranks[1].take_failures()
    assert "tag is not whole on rank 1" in str(failure)
    assert isinstance(failure.__cause__, OSError)
    assert not ranks[1].take_failures()
    assert [path.name for path in (tmp_path / "tag").iterdir()] == [".dshistory-00000.json"]
    # Later saves are not held up.
    for saves in ranks:
        saves.complete(Save("2", tmp_path, "next", moves_latest=True))
        saves.wait()
    assert latest(tmp_path) == "next"
    full.close()


def test_a_file_that_could_not_be_begun_fails_its_save(tmp_path, ranks):
    save = [Save("1", tmp_path, "tag", moves_latest=True) for _ in ranks]
    ranks[0].fail(save[0], OSError(errno.ENOSPC, "No space left on device"))
    for rank, saves in enumerate(ranks):
        saves.complete(save[rank])
        saves.wait()
    assert latest(tmp_path) is None
    assert len(ranks[0].take_failures()) == 1


def test_a_save_that_latest_must_not_name_leaves_no_receipts(tmp_path, ranks, writer):
    for rank, saves in enumerate(ranks):
        save = Save("1", tmp_path, "tag", moves_latest=False)
        saves.add(save, begin(save, f"{rank}.pt", writer))
        saves.complete(save)
        saves.wait()
    assert latest(tmp_path) is None
    assert sorted(path.name for path in (tmp_path / "tag").iterdir()) == ["0.pt", "1.pt"]


def test_an_incomplete_save_does_not_count(tmp_path, ranks, writer):
    complete, open_ = (Save("1", tmp_path, "tag", moves_latest=True) for _ in ranks)
    ranks[0].complete(complete)
    ranks[1].add(open_, begin(open_, "1.pt", writer))
    for saves in ranks:
        saves.wait()
    assert latest(tmp_path) is None


def test_the_receipt_comes_after_the_files(tmp_path, ranks, writer):
    save = Save("1", tmp_path, "tag", moves_latest=True)
    write = begin(save, "0.pt", writer)
    ranks[0].add(save, write)
    ranks[0].complete(save)
    ranks[0].wait()
    assert json.loads(save.receipt(0).read_text()) == {"save": "1"}
    assert save.receipt(0).stat().st_mtime_ns >= write.final.stat().st_mtime_ns
