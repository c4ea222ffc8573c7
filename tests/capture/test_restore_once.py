"""A restore keeps the bytes that it has verified, as far as memory allows, and reads only the others again."""

import errno
import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
from capture.load.assignments import Assignment
from capture.load.read_into import read_into
from catalog.data_files import check_data, memory_ahead
from catalog.data_files.check_data import check_extents
from catalog.data_files.stored_bytes import Piece, ReadBuffer, by_place
from catalog.history import History
from catalog.records import Extent

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


def extents_of(history: Path, trained: Any) -> list[Extent]:
    """Return the extents of six matrices: two of the model, and their moments."""
    opened = History.open(history)
    found = opened.extents(opened.resolve(f"{trained[0].run}:1"))
    return [extent for extent in found if extent.shape == (WIDTH, WIDTH)]


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


class SlowMemory:
    """Stands for the thread that takes memory, and for the clock: each read takes a second, and each batch's memory a
    number of seconds; `then` is that of all but the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, *, then: float | None = None) -> None:
        self.now = 0.0
        read = ReadBuffer.read
        takes = itertools.chain([seconds], itertools.repeat(seconds if then is None else then))

        def read_in_a_second(buffer: ReadBuffer, *args: Any) -> Any:
            self.now += 1
            return read(buffer, *args)

        def begun(pool: Executor, taken: Callable[..., Any], pieces: Sequence[Piece]) -> "Coming":
            memory, _ = taken(pieces)
            return Coming(self, memory, next(takes))

        monkeypatch.setattr(ReadBuffer, "read", read_in_a_second)
        monkeypatch.setattr(memory_ahead, "begun", begun)
        for module in (memory_ahead, check_data):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)


@dataclass
class Coming:
    """Stands for the future of one batch's memory."""

    clock: SlowMemory
    memory: ReadBuffer
    seconds: float

    def __post_init__(self) -> None:
        self.due = self.clock.now + self.seconds

    def result(self, timeout: float | None) -> tuple[ReadBuffer, float]:
        waited = max(0.0, self.due - self.clock.now)
        self.clock.now += waited if timeout is None else min(waited, timeout)
        if self.clock.now < self.due:
            raise TimeoutError
        return self.memory, self.seconds


@pytest.mark.parametrize(
    ("seconds", "kept_batches", "took_s"),
    [
        (0, 6, 6),
        (0.5, 5, 6),  # the first is read meanwhile
        (1.25, 4, 6.75),  # memory that is a quarter of a second away is waited for
        (1.5, 2, 6),
        (3, 1, 6),
        (100, 0, 6),
    ],
)
def test_as_much_is_kept_as_there_is_memory_for_in_time(history, trained, monkeypatch, seconds, kept_batches, took_s):
    clock = SlowMemory(monkeypatch, seconds)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    extents = extents_of(history, trained)
    assert len(extents) == 6
    kept = {}
    assert list(check_extents(history, extents, kept=kept, most_kept_bytes=ALL)) == []
    assert (len(kept), clock.now) == (kept_batches, took_s)


def test_a_single_batch_waits_for_its_memory(history, trained, monkeypatch):
    SlowMemory(monkeypatch, 100)
    extents = extents_of(history, trained)
    kept = {}
    assert list(check_extents(history, extents, kept=kept, most_kept_bytes=ALL)) == []
    assert kept.keys() == set(extents)


def test_memory_is_taken_while_a_batch_is_read(history, trained, monkeypatch):
    """Each read begins when the memory for another batch is being taken, and not before; the last one has none left."""
    both = Barrier(2)
    populate, read = ReadBuffer.populate, ReadBuffer.read
    reads: list[int] = []

    def populate_during_a_read(buffer: ReadBuffer, *args: Any, **options: Any) -> None:
        both.wait(timeout=60)
        populate(buffer, *args, **options)

    def read_while_memory_is_taken(buffer: ReadBuffer, *args: Any) -> Any:
        reads.append(1)
        if len(reads) == 1:
            both.wait(timeout=60)
        return read(buffer, *args)

    monkeypatch.setattr(ReadBuffer, "populate", populate_during_a_read)
    monkeypatch.setattr(ReadBuffer, "read", read_while_memory_is_taken)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    extents = extents_of(history, trained)[:2]
    kept = {}
    assert list(check_extents(history, extents, kept=kept, most_kept_bytes=ALL)) == []
    assert len(reads) == 2


def test_what_is_being_taken_at_the_end_is_given_up(monkeypatch):
    """A thread that goes on taking memory that nobody needs would hold up what comes next."""
    taking, ended = Event(), Event()

    def populate(buffer: ReadBuffer, pieces: Sequence[Piece], *, stopped: Callable[[], bool]) -> None:
        taking.set()
        while not stopped():
            time.sleep(0.001)
        ended.set()

    monkeypatch.setattr(ReadBuffer, "populate", populate)
    with memory_ahead.MemoryAhead() as ahead:
        ahead.begin([Piece("file", 0, 1)])
        assert taking.wait(60)
        assert ahead.memory(patience_s=0.0) is None
    assert ended.is_set()


@pytest.mark.parametrize("batch_bytes", [1, check_data.BATCH_BYTES])
@pytest.mark.parametrize("place", range(6))
def test_damaged_bytes_are_found_and_not_kept(history, trained, monkeypatch, batch_bytes, place):
    """In batches from either end, with memory of their own or without."""
    monkeypatch.setattr(check_data, "BATCH_BYTES", batch_bytes)
    extents = extents_of(history, trained)
    victim = sorted(extents, key=by_place)[place]
    with (history / victim.file).open("r+b") as file:
        file.seek(victim.offset)
        byte = file.read(1)[0]
        file.seek(victim.offset)
        file.write(bytes([byte ^ 1]))
    kept = {}
    (damage,) = check_extents(history, extents, kept=kept, most_kept_bytes=ALL)
    assert victim.name in damage.field
    assert kept.keys() <= set(extents) - {victim}
    assert kept.keys() == set(extents) - {victim} or batch_bytes == 1


def test_where_the_system_refuses_memory_nothing_is_kept(history, trained, monkeypatch):
    refused: list[int] = []

    def populate(buffer: ReadBuffer, pieces: Sequence[Piece], *, stopped: Callable[[], bool]) -> None:
        refused.append(1)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(ReadBuffer, "populate", populate)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    kept = {}
    read: list[int] = []
    extents = extents_of(history, trained)
    assert list(check_extents(history, extents, progress=read.append, kept=kept, most_kept_bytes=ALL)) == []
    assert (kept, sum(read)) == ({}, sum(extent.nbytes for extent in extents))
    assert refused == [1], "once is enough"


def test_without_a_thread_all_is_kept(history, trained, monkeypatch):
    def submit(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(memory_ahead.ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    extents = extents_of(history, trained)
    kept = {}
    assert list(check_extents(history, extents, kept=kept, most_kept_bytes=ALL)) == []
    assert kept.keys() == set(extents)


def test_memory_that_becomes_slow_is_not_waited_for(history, trained, monkeypatch):
    """Of six batches the first memory comes at once, and the next takes far longer than that one tells."""
    clock = SlowMemory(monkeypatch, 0.4, then=100)
    monkeypatch.setattr(check_data, "BATCH_BYTES", 1)
    kept = {}
    assert list(check_extents(history, extents_of(history, trained), kept=kept, most_kept_bytes=ALL)) == []
    assert (len(kept), clock.now) == (1, 6)
