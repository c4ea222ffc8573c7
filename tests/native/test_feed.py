"""Each block of a fed extent is lent with a slot, filled by its feeder, and written like every other."""

import ctypes
import errno
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_helpers import (
    ALIGN,
    BLOCK,
    HEADER,
    LEAST_BUDGET,
    MIB,
    Extents,
    Piece,
    check_file,
    each_backend,
    extents,
    lazy_run,
    new_writer,
    pieces,
)

import native

numbers = itertools.count()


def with_fed(layout: list[Piece], fed: list[Piece], *, seed: int = 0) -> tuple[Extents, native.WritePlan]:
    """Make a file of `layout`, then `fed` from the next page on, and its plan, in which fed extents have no address."""
    end = ALIGN + sum(piece.gap + piece.nbytes for piece in layout)
    if fed:
        fed = [Piece(fed[0].nbytes, fed[0].gap + -end % ALIGN, "next", False), *fed[1:]]
    data = extents([*layout, *fed], seed=seed)
    is_fed = np.arange(len(layout) + len(fed)) >= len(layout)
    plan = native.WritePlan(
        offsets=data.offsets,
        addresses=np.where(is_fed, np.uint64(0), data.addresses),
        nbytes=data.nbytes,
        eager=data.eager,
        data_start=ALIGN,
        data_end=data.data_end,
        align=ALIGN,
        fed=is_fed.astype(np.uint8),
    )
    return data, plan


def slot_of(feed: native.Feed) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * feed.nbytes).from_address(feed.address), dtype=np.uint8)


def pour(feed: native.Feed, data: Extents) -> None:
    """Fill the slot as a device would: the extents' bytes, and dirt between them."""
    slot = slot_of(feed)
    slot[:] = 0xEE
    for i, (offset, nbytes) in enumerate(zip(data.offsets.tolist(), data.nbytes.tolist(), strict=True)):
        begin, end = max(offset, feed.offset), min(offset + nbytes, feed.offset + feed.nbytes)
        if begin < end:
            position = int(data.positions[i]) + begin - offset
            slot[begin - feed.offset : end - feed.offset] = data.memory[position : position + end - begin]


def feed_all(job: native.WriteJob, data: Extents, *, most: int = 3) -> int:
    """Feed with up to `most` slots out at once, and return the largest number that was out."""
    out: deque[native.Feed] = deque()
    seen = 0
    while True:
        feed = job.feed_next() if len(out) < most else None
        if feed is not None:
            out.append(feed)
            seen = max(seen, len(out))
        elif out:
            pour(out[0], data)
            job.fed(out.popleft())
        else:
            return seen


def in_threads(*works: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.slow
@each_backend
@given(
    layout=pieces(most=4),
    fed=pieces(most=6),
    budget_bytes=st.sampled_from([LEAST_BUDGET, LEAST_BUDGET + 3 * BLOCK, 4 * MIB]),
    block_bytes=st.sampled_from([ALIGN, BLOCK]),
    depth=st.integers(1, 4),
    most=st.integers(1, 5),
    reorder=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fed_bytes_are_written_with_their_checksums(
    tmp_path: Path, backend, layout, fed, budget_bytes, block_bytes, depth, most, reorder
) -> None:
    fed = [Piece(piece.nbytes, piece.gap, "next", False) for piece in fed]
    data, plan = with_fed(layout, fed)
    assert plan.extents == len(layout) + len(fed)
    path = tmp_path / f"{next(numbers)}"
    writer = new_writer(backend, budget_bytes=budget_bytes, block_bytes=block_bytes, depth=depth, reorder=reorder)
    free = writer.budget_free_bytes()
    job = writer.start(plan, str(path))
    feed_all(job, data, most=most)
    assert job.wait()
    assert job.checksums() == b"".join(native.checksum(content) for content in data.contents())
    job.finish(header=HEADER, trailer=b"")
    check_file(path, data)
    assert writer.budget_free_bytes() == free
    path.unlink()


@each_backend
def test_several_jobs_share_the_least_budget(tmp_path: Path, backend) -> None:
    """Feeders want more slots than exist, jobs release meanwhile, and eager bytes want slots too."""
    writer = new_writer(backend, depth=2, reorder=True)
    free = writer.budget_free_bytes()

    def run(seed: int) -> None:
        for turn in range(4):
            layout = [Piece(3 * BLOCK, 0, "odd", True), Piece(MIB, 0, "odd", False)]
            data, plan = with_fed(layout, [Piece(2 * MIB + 77, 0, "next", False)] * 2, seed=seed)
            path = tmp_path / f"{seed}-{turn}"
            job = writer.start(plan, str(path))
            in_threads(lambda: feed_all(job, data, most=4), job.release)  # noqa: B023
            assert job.wait()
            job.finish(header=HEADER, trailer=b"")
            check_file(path, data)

    in_threads(*(lambda seed=seed: run(seed) for seed in range(3)))
    assert writer.budget_free_bytes() == free


@each_backend
def test_the_barrier_does_not_wait_for_fed_extents(tmp_path: Path, backend) -> None:
    data, plan = with_fed([Piece(MIB, 0, "odd", True), Piece(MIB, 0, "odd", False)], [Piece(MIB, 0, "next", False)])
    writer = new_writer(backend)
    job = writer.start(plan, str(tmp_path / "f"))
    job.release()
    assert job.released()
    assert not job.wait(timeout_s=0)
    data.memory[: 2 * MIB] ^= 0xFF
    copy = Extents(data.memory.copy(), data.offsets, data.positions, data.nbytes, data.eager, data.data_end)
    copy.memory[: 2 * MIB] ^= 0xFF
    feed_all(job, copy)
    assert job.wait()
    assert job.checksums() == b"".join(native.checksum(content) for content in copy.contents())


def test_a_feeder_with_a_slot_never_waits_for_another(tmp_path: Path) -> None:
    data, plan = with_fed([], [Piece(8 * BLOCK, 0, "next", False)])
    writer = new_writer("posix")
    jobs = [writer.start(plan, str(tmp_path / name)) for name in "ab"]
    held = [job.feed_next() for job in jobs]
    assert all(feed is not None for feed in held)
    small = [jobs[0].feed_next() for _ in range(5)]
    assert small[-1] is None
    for feed in [held[0], *small]:
        if feed is not None:
            pour(feed, data)
            jobs[0].fed(feed)
    feed_all(jobs[0], data)
    assert jobs[0].wait()


def test_feeding_goes_in_order_and_once(tmp_path: Path) -> None:
    data, plan = with_fed([], [Piece(3 * BLOCK, 0, "next", False)])
    writer = new_writer("posix", budget_bytes=MIB)
    job, other = (writer.start(plan, str(tmp_path / name)) for name in "ab")
    first, second = job.feed_next(), job.feed_next()
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (ALIGN, ALIGN + BLOCK)
    pour(first, data)
    pour(second, data)
    with pytest.raises(RuntimeError, match="in the order handed out"):
        job.fed(second)
    with pytest.raises(ValueError, match="another job"):
        other.fed(first)
    job.fed(first)
    with pytest.raises(RuntimeError, match="fed already"):
        job.fed(first)
    with pytest.raises(RuntimeError, match="fed already"):
        first.address  # noqa: B018
    job.fed(second)
    feed_all(job, data)
    assert job.wait()


@pytest.mark.parametrize("how", ["abort", "close", "drop", "disk"])
def test_a_failure_wakes_the_feeder_and_keeps_its_slot(tmp_path: Path, how) -> None:
    _, plan = with_fed([Piece(BLOCK, 0, "odd", True)], [Piece(64 * BLOCK, 0, "next", False)])
    faults = {"fail_after": 0, "errno": errno.ENOSPC} if how == "disk" else {"fail_after": -1}
    writer = new_writer("posix", **faults)
    free = writer.budget_free_bytes()
    job = writer.start(plan, str(tmp_path / "f"))
    if how == "disk":
        with pytest.raises(OSError, match="No space"):
            job.wait()
    else:
        feed = job.feed_next()
        assert feed is not None
        if how == "drop":
            del feed
        elif how == "abort":
            job.abort()
        else:
            writer.close()
        if how != "drop":
            assert writer.budget_free_bytes() < free
            slot_of(feed)[:] = 1  # a copy that was on its way
            assert writer.staging[0] != 0
            job.fed(feed)
    with pytest.raises(OSError, match=r"f'$") as failure:
        job.feed_next()
    assert failure.value.errno == (errno.ENOSPC if how == "disk" else errno.ECANCELED)
    with pytest.raises(OSError, match=r"f'$"):
        job.wait()
    assert writer.budget_free_bytes() == (0 if how == "close" else free)
    assert (writer.staging[0] == 0) == (how == "close")


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_feeder_that_waits_for_a_slot_is_woken(tmp_path: Path, how) -> None:
    """All slots belong to the job before, so nothing else wakes the feeder."""
    _, plan = with_fed([], [Piece(16 * BLOCK, 0, "next", False)])
    writer = new_writer("posix")
    greedy, waiting = (writer.start(plan, str(tmp_path / name)) for name in "ab")
    held = list(iter(greedy.feed_next, None))
    assert writer.budget_free_bytes() < BLOCK
    outcome: list[int | None] = []

    def wait() -> None:
        try:
            waiting.feed_next()
        except OSError as error:
            outcome.append(error.errno)

    in_threads(wait, waiting.abort if how == "abort" else writer.close)
    assert outcome == [errno.ECANCELED]
    del held


def test_the_staging_memory_holds_every_slot(tmp_path: Path) -> None:
    _, plan = with_fed([], [Piece(16 * BLOCK, 0, "next", False)])
    writer = new_writer("posix")
    address, nbytes = writer.staging
    assert nbytes == writer.budget_bytes == LEAST_BUDGET
    assert address % ALIGN == 0
    job = writer.start(plan, str(tmp_path / "f"))
    held = list(iter(job.feed_next, None))
    assert held
    assert all(address <= feed.address <= feed.address + feed.nbytes <= address + nbytes for feed in held)
    del job, writer
    slot_of(held[0])[:] = 1  # still mapped


def test_finalizers_run_before_the_staging_memory_is_unmapped() -> None:
    writer = new_writer("posix")
    address, _ = writer.staging
    told: list[int] = []
    weakref.finalize(writer, lambda: told.append(ctypes.c_char.from_address(address).value[0]))
    del writer
    assert told == [0]


def test_fed_extents_are_checked_by_name() -> None:
    columns = {
        "offsets": np.array([4096, 8000], dtype=np.uint64),
        "addresses": np.array([0, 0], dtype=np.uint64),
        "nbytes": np.array([10, 10], dtype=np.uint64),
        "eager": np.array([0, 0], dtype=np.uint8),
    }

    def plan(fed: list[int], **change: object) -> native.WritePlan:
        fields = {**columns, **change, "fed": np.array(fed, dtype=np.uint8)}
        return native.WritePlan(**fields, data_start=4096, data_end=12288, align=4096)

    real = np.array([1 << 20, 1 << 20], dtype=np.uint64)
    with pytest.raises(ValueError, match="extent 1 follows a fed one"):
        plan([1, 0], addresses=real)
    with pytest.raises(ValueError, match="extent 1 is the first fed one, but at 8000 it shares a page"):
        plan([0, 1], addresses=real)
    with pytest.raises(ValueError, match="extent 0 is both eager and fed"):
        plan([1, 1], eager=np.array([1, 0], dtype=np.uint8))
    with pytest.raises(ValueError, match="extent 0 has 10 bytes at address 0"):
        plan([0, 1], offsets=np.array([4096, 8192], dtype=np.uint64))
    with pytest.raises(ValueError, match="fed has 1 entries"):
        plan([1])
    assert plan([1, 1]).direct_bytes == 0


def test_a_forked_child_leaves_the_parents_slots_alone(tmp_path: Path) -> None:
    data, plan = with_fed([], [Piece(4 * BLOCK, 0, "next", False)])
    writer = new_writer("posix")
    job = writer.start(plan, str(tmp_path / "f"))
    feed = job.feed_next()
    assert feed is not None
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (job.feed_next, lambda: job.fed(feed)):
            try:
                call()
            except RuntimeError as error:
                refused += "belongs to process" in str(error)
        del feed
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    pour(feed, data)
    job.fed(feed)
    feed_all(job, data)
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    check_file(tmp_path / "f", data)


def test_a_plan_without_fed_extents_has_nothing_to_feed(tmp_path: Path) -> None:
    writer = new_writer("posix")
    data = lazy_run(MIB)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    assert job.feed_next() is None
    assert job.wait()
