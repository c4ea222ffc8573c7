"""A restore keeps the bytes that it has verified, as far as memory allows, and reads only the others again."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from threading import Barrier, Semaphore, current_thread, main_thread

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
from capture.load.assignments import Assignment
from capture.load.read_into import read_into
from catalog.data_files import check_data
from catalog.data_files.check_data import check_extents
from catalog.data_files.stored_bytes import Piece, ReadBuffer
from catalog.history import History

WIDTH = 512
ALL = 1 << 40


@pytest.fixture
def trained(history):
    """Return a session that has captured step 1, the state of that step, and its bytes."""
    model, optimizer = make(WIDTH)
    with capture.enable(model, optimizer=optimizer, every=1, history=history, stats_every=0) as session:
        one_step(model, optimizer)
    expected = reference(model, optimizer)
    return session, expected, sum(t.nbytes for kind in expected.values() for t in kind.values())


def _read_by_process() -> int:
    """Return the bytes that read calls of this process have returned so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))


@pytest.mark.parametrize(("room", "passes"), [(ALL, 1), (0.5, 1.5), (0, 2)])
def test_a_verified_restore_reads_again_only_what_it_had_no_room_for(history, trained, monkeypatch, room, passes):
    session, expected, nbytes = trained
    module = importlib.import_module("capture.restore")  # `capture.restore` itself is the function
    monkeypatch.setattr(module, "spare_bytes", lambda processes: int(room * nbytes))
    model, optimizer = make(WIDTH, seed=6)
    one_step(model, optimizer)
    before = _read_by_process()
    capture.restore(f"{session.run}:1", history=history, model=model, optimizer=optimizer)
    read = _read_by_process() - before
    assert_same(reference(model, optimizer), expected)
    # A matrix is a third of the bytes of its kind, and where the room ends inside one it is read again.
    assert (passes - 0.1) * nbytes < read < (passes + 0.3) * nbytes


def test_what_is_put_back_is_what_was_verified(history, trained):
    """The file is damaged after the last byte was compared, and before the first one is used."""
    session, expected, _ = trained
    opened = History.open(history)
    extent = next(
        extent
        for extent in opened.extents(opened.resolve(f"{session.run}:1"))
        if (extent.kind, extent.name) == ("model", "inner.weight")
    )
    kept = {}
    assert list(check_extents(history, [extent], kept=kept, most_kept_bytes=extent.nbytes)) == []
    (history / extent.file).unlink()
    live = torch.zeros(WIDTH, WIDTH)
    read_into(history, [Assignment(extent, live, 0, 0, extent.numel)], kept)
    assert torch.equal(live, expected["model"]["inner.weight"])


@pytest.mark.parametrize(("seconds", "kept_batches"), [(0, 6), (1, 2)])
def test_bytes_are_kept_as_long_as_reading_does_not_wait_for_memory(
    history, trained, monkeypatch, seconds, kept_batches
):
    """The clock stands still but for the memory that the second batch and all later ones wait for: where that takes
    longer than the disk, a second read is cheaper, and only what had its memory already is kept."""
    now = 0.0
    was_read = Semaphore(1)

    def populate(buffer: ReadBuffer, pieces: Sequence[Piece]) -> None:
        nonlocal now
        assert was_read.acquire(timeout=60)
        now += seconds

    monkeypatch.setattr(ReadBuffer, "populate", populate)
    monkeypatch.setattr(check_data, "monotonic", lambda: now)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    session, _, _ = trained
    opened = History.open(history)
    extents = [extent for extent in opened.extents(opened.resolve(f"{session.run}:1")) if extent.kind == "model"]
    assert len(extents) == 6
    kept = {}
    damaged = check_extents(history, extents, progress=lambda _: was_read.release(), kept=kept, most_kept_bytes=ALL)
    assert list(damaged) == []
    assert len(kept) == kept_batches


def test_memory_is_taken_while_the_batch_before_is_read(history, trained, monkeypatch):
    """Each read begins when the memory for the next batch is being taken, and not before; the first takes its own."""
    session, _, _ = trained
    opened = History.open(history)
    extents = [extent for extent in opened.extents(opened.resolve(f"{session.run}:1")) if extent.kind == "model"]
    both = Barrier(2)
    populate, read = ReadBuffer.populate, ReadBuffer.read

    def populate_during_a_read(buffer: ReadBuffer, pieces: Sequence[Piece]) -> None:
        if current_thread() is not main_thread():
            both.wait(timeout=60)
        populate(buffer, pieces)

    def read_while_memory_is_taken(buffer: ReadBuffer, *args) -> object:
        both.wait(timeout=60)
        return read(buffer, *args)

    monkeypatch.setattr(ReadBuffer, "populate", populate_during_a_read)
    monkeypatch.setattr(ReadBuffer, "read", read_while_memory_is_taken)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    kept = {}
    assert list(check_extents(history, extents, kept=kept, most_kept_bytes=ALL)) == []
    assert kept.keys() == set(extents)


def test_damaged_bytes_are_not_kept(history, trained):
    session, _, _ = trained
    opened = History.open(history)
    extents = [extent for extent in opened.extents(opened.resolve(f"{session.run}:1")) if extent.kind == "model"]
    victim = extents[1]
    with (history / victim.file).open("r+b") as file:
        file.seek(victim.offset)
        byte = file.read(1)[0]
        file.seek(victim.offset)
        file.write(bytes([byte ^ 1]))
    kept = {}
    (damage,) = check_extents(history, extents, kept=kept, most_kept_bytes=ALL)
    assert victim.name in damage.field
    assert kept.keys() == set(extents) - {victim}
