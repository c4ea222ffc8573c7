"""The writer writes the bytes of the plan, whatever the budget, the backend and the order of completions."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
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
    fill,
    lazy_run,
    new_writer,
    pieces,
    same_bytes,
)

import native

numbers = itertools.count()


def finish(job: native.WriteJob, path: Path, data: Extents, *, trailer: bytes = b"") -> None:
    """Wait, then check file and checksums against `data` as it is in memory now."""
    assert job.wait()
    assert job.released()
    want = b"".join(native.checksum(content) for content in data.contents())
    assert job.checksums() == want
    assert job.finish(header=HEADER, trailer=trailer) == data.data_end + len(trailer)
    check_file(path, data, trailer=trailer)


@each_backend
@given(
    layout=pieces(),
    budget_bytes=st.sampled_from([LEAST_BUDGET, LEAST_BUDGET + ALIGN, LEAST_BUDGET + 3 * BLOCK, 4 * MIB]),
    block_bytes=st.sampled_from([ALIGN, BLOCK // 4, BLOCK]),
    depth=st.integers(1, 6),
    faults=st.fixed_dictionaries(
        {
            "reorder": st.booleans(),
            "short_write_every": st.sampled_from([0, 1, 2, 3]),
            "delay_us": st.sampled_from([0, 0, 20]),
        }
    ),
    release=st.booleans(),
    trailer=st.sampled_from([b"", b"t" * ALIGN, b"u" * (MIB + ALIGN)]),
)
@example(
    layout=[Piece(MIB, 0, "congruent", False)] * 2,
    budget_bytes=LEAST_BUDGET,
    block_bytes=BLOCK,
    depth=4,
    faults={"reorder": True, "short_write_every": 1},
    release=False,
    trailer=b"",
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_bytes_equal_an_eager_copy(
    tmp_path: Path, backend, layout, budget_bytes, block_bytes, depth, faults, release, trailer
) -> None:
    data = extents(layout)
    plan = data.plan()
    assert plan.extents == len(layout)
    assert plan.total_bytes == int(data.nbytes.sum())
    path = tmp_path / f"{next(numbers)}"
    writer = new_writer(backend, budget_bytes=budget_bytes, block_bytes=block_bytes, depth=depth, **faults)
    job = writer.start(plan, str(path))
    if release:
        job.release()
    finish(job, path, data, trailer=trailer)
    stats = job.stats
    assert stats["bytes_direct"] + stats["bytes_copied"] == data.data_end - ALIGN
    assert stats["bytes_direct"] <= plan.direct_bytes
    if not release:
        assert stats["bytes_direct"] == plan.direct_bytes
    writer.close()
    path.unlink()


@each_backend
def test_eager_bytes_are_copied_inside_start(tmp_path: Path, backend) -> None:
    data = extents([Piece(3 * BLOCK + 5, 0, "congruent", True), Piece(100, 7, "odd", True)])
    want = data.image()
    writer = new_writer(backend, delay_us=2000, depth=1)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    fill(data.memory, 1)
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    same_bytes((tmp_path / "f").read_bytes()[ALIGN:], want)


@each_backend
@pytest.mark.parametrize(
    ("place", "blocks_before_release"), [*(("congruent", blocks) for blocks in (0, 2, 3, 4)), ("odd", 2)]
)
def test_sources_may_change_as_soon_as_release_returns(tmp_path: Path, backend, place, blocks_before_release) -> None:
    """The barrier waits for writes in flight, which would be torn if the caller overwrote their memory."""
    data = lazy_run(48 * MIB, place=place)
    want, checksum = data.image(), native.checksum(data.bytes_of(0))
    path = tmp_path / "f"
    writer = new_writer(backend, budget_bytes=64 * MIB, block_bytes=4 * MIB, depth=4)
    job = writer.start(data.plan(), str(path))
    while written_blocks(job) < blocks_before_release:
        pass
    stall_s = job.release()
    data.memory[:] = 0xEE
    assert job.released()
    assert stall_s >= 0
    assert job.wait()
    assert job.checksums() == checksum
    same_bytes(path.read_bytes()[ALIGN:], want)


def written_blocks(job: native.WriteJob) -> float:
    return (job.stats["bytes_direct"] + job.stats["bytes_copied"]) / (4 * MIB)


@each_backend
def test_release_is_idempotent_and_may_come_from_several_threads(tmp_path: Path, backend) -> None:
    data = lazy_run(4 * MIB)
    want = data.image()
    writer = new_writer(backend, delay_us=100)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    threads = [threading.Thread(target=job.release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.release()
    fill(data.memory, 9)
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    same_bytes((tmp_path / "f").read_bytes()[ALIGN:], want)


@each_backend
def test_a_wait_that_times_out_says_so_and_can_be_repeated(tmp_path: Path, backend) -> None:
    data = lazy_run(4 * MIB)
    writer = new_writer(backend, delay_us=2000, depth=1)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    assert not job.wait(0.0)
    with pytest.raises(RuntimeError, match="not all written"):
        job.checksums()
    with pytest.raises(RuntimeError, match="not all written"):
        job.finish(header=HEADER, trailer=b"")
    assert job.wait(1e300)
    finish(job, tmp_path / "f", data)


@each_backend
@pytest.mark.parametrize("place", ["congruent", "odd"])
def test_a_job_larger_than_the_budget_streams_through_it(tmp_path: Path, backend, place) -> None:
    data = extents([Piece(5 * MIB, 0, place, i == 0) for i in range(3)])
    writer = new_writer(backend, reorder=True)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    job.release()
    finish(job, tmp_path / "f", data)
    assert writer.budget_bytes == LEAST_BUDGET


@each_backend
@given(layouts=st.lists(pieces(most=4), min_size=2, max_size=4), order=st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_jobs_in_flight_share_one_budget(tmp_path: Path, backend, layouts, order) -> None:
    """A slot handed out twice would put one job's bytes into another's file."""
    writer = new_writer(backend, reorder=True, delay_us=20)
    jobs = []
    for seed, layout in enumerate(layouts):
        data = extents(layout, seed=seed)
        path = tmp_path / f"{next(numbers)}"
        jobs.append((writer.start(data.plan(), str(path)), path, data))
    order.shuffle(jobs)
    for job, path, data in jobs:
        job.release()
        finish(job, path, data)
        path.unlink()
    assert writer.budget_free_bytes() == LEAST_BUDGET


@each_backend
def test_start_waits_for_a_budget_that_another_job_holds_and_then_proceeds(tmp_path: Path, backend) -> None:
    first = extents([Piece(MIB, 0, "odd", True)], seed=1)
    second = extents([Piece(MIB, 0, "odd", True)], seed=2)
    writer = new_writer(backend, delay_us=3000, depth=1)
    jobs = [writer.start(data.plan(), str(tmp_path / f"{i}")) for i, data in enumerate([first, second])]
    assert jobs[1].stats["eager_s"] > 10 * 0.003  # it needs 16 blocks where there are 6
    finish(jobs[0], tmp_path / "0", first)
    finish(jobs[1], tmp_path / "1", second)


@each_backend
def test_one_plan_serves_many_jobs(tmp_path: Path, backend) -> None:
    data = extents([Piece(300, 0, "odd", True), Piece(2 * MIB, 10, "congruent", False)])
    plan = data.plan()
    writer = new_writer(backend)
    for turn in range(5):
        fill(data.memory, turn)
        path = tmp_path / f"{turn}"
        job = writer.start(plan, str(path))
        job.release()
        finish(job, path, data)


@each_backend
def test_a_plan_without_extents_makes_a_file_of_its_ends(tmp_path: Path, backend) -> None:
    data = extents([])
    job = new_writer(backend).start(data.plan(), str(tmp_path / "f"))
    job.release()
    finish(job, tmp_path / "f", data, trailer=b"x" * ALIGN)


def test_large_congruent_runs_go_straight_from_memory_and_pieces_of_a_run_do_not_break_it() -> None:
    data = extents([Piece(MIB // 4, 0, "next", False) for _ in range(8)])
    assert data.plan().direct_bytes == 2 * MIB
    with_empty = extents([Piece(n, 0, "next", False) for n in (0, MIB, 0, MIB, 0)])
    with_empty.positions[2] = 1  # an empty tensor may be at any address
    assert with_empty.plan().direct_bytes == 2 * MIB
    assert lazy_run(2 * MIB, place="odd").plan().direct_bytes == 0
    assert extents([Piece(2 * MIB, 0, "congruent", True)]).plan().direct_bytes == 0


@each_backend
def test_the_writer_states_what_it_is(backend) -> None:
    writer = new_writer(backend, budget_bytes=LEAST_BUDGET + 1)
    assert writer.backend == backend
    assert writer.budget_bytes == LEAST_BUDGET + 1
    assert writer.budget_free_bytes() == LEAST_BUDGET
    assert backend == "io_uring" or not writer.registered


@each_backend
def test_addresses_are_not_touched_after_release(tmp_path: Path, backend) -> None:
    """The memory is unmapped: a late read of it would kill the process, and a late write from it would be EFAULT."""
    data = lazy_run(8 * MIB)
    plan, want = data.plan(), data.image()
    job = new_writer(backend, depth=8, delay_us=50).start(plan, str(tmp_path / "f"))
    job.release()
    del data
    np.zeros(1 << 16)
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    same_bytes((tmp_path / "f").read_bytes()[ALIGN:], want)
