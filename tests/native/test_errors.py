"""When a write fails, the error says what, where and why, nothing is left behind, and no call hangs."""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from native_helpers import (
    ALIGN,
    BLOCK,
    HEADER,
    LEAST_BUDGET,
    MIB,
    Piece,
    check_file,
    each_backend,
    extents,
    lazy_run,
    new_writer,
)

import native


@each_backend
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("place", ["congruent", "odd"])
@pytest.mark.parametrize("fail_after", [0, 7])
def test_wait_reports_a_failed_write_with_its_place(tmp_path: Path, backend, code, place, fail_after) -> None:
    data = lazy_run(4 * MIB, place=place)
    path = tmp_path / "f"
    writer = new_writer(backend, fail_after=fail_after, errno=code, depth=1)
    job = writer.start(data.plan(), str(path))
    assert job.release() >= 0
    assert job.released()
    with pytest.raises(OSError) as failure:
        job.wait()
    assert failure.value.errno == code
    assert failure.value.filename == str(path)
    assert os.strerror(code) in str(failure.value)
    assert f"write of {BLOCK} bytes at offset {ALIGN + fail_after * BLOCK}" in str(failure.value)
    for call in (job.checksums, lambda: job.finish(header=HEADER, trailer=b""), job.wait):
        with pytest.raises(OSError, match="write of") as again:
            call()
        assert again.value.errno == code
    assert path.exists()
    job.abort()
    job.abort()
    assert not path.exists()
    assert writer.budget_free_bytes() == LEAST_BUDGET


@each_backend
def test_a_failure_while_eager_bytes_wait_for_slots_does_not_hang_start(tmp_path: Path, backend) -> None:
    data = extents([Piece(4 * MIB, 0, "odd", True)])
    job = new_writer(backend, fail_after=3).start(data.plan(), str(tmp_path / "f"))
    with pytest.raises(OSError, match="write of") as failure:
        job.wait()
    assert failure.value.errno == errno.EIO


@each_backend
def test_one_jobs_failure_leaves_the_others_alone(tmp_path: Path, backend) -> None:
    good, bad = lazy_run(2 * MIB, seed=1), lazy_run(2 * MIB, seed=2)
    writer = new_writer(backend)
    jobs = [writer.start(data.plan(), str(tmp_path / name)) for data, name in ((bad, "bad"), (good, "good"))]
    jobs[0].abort()
    jobs[1].release()
    assert jobs[1].wait()
    jobs[1].finish(header=HEADER, trailer=b"")
    check_file(tmp_path / "good", good)
    assert not (tmp_path / "bad").exists()
    with pytest.raises(OSError, match="abort"):
        jobs[0].wait()


@each_backend
def test_abort_in_the_middle_frees_the_budget_and_removes_the_file(tmp_path: Path, backend) -> None:
    writer = new_writer(backend, delay_us=200)
    for place in ("congruent", "odd"):
        path = tmp_path / place
        data = lazy_run(8 * MIB, place=place)
        job = writer.start(data.plan(), str(path))
        job.abort()
        assert not path.exists()
        assert job.released()
    assert writer.budget_free_bytes() == LEAST_BUDGET


@each_backend
def test_abort_wakes_a_release_that_waits_for_slots(tmp_path: Path, backend) -> None:
    data = extents([Piece(32 * MIB, 0, "odd", False)])
    job = new_writer(backend, delay_us=1000, depth=1).start(data.plan(), str(tmp_path / "f"))
    release = threading.Thread(target=job.release)
    release.start()
    job.abort()
    release.join()
    assert not (tmp_path / "f").exists()


@each_backend
def test_the_destructor_removes_an_unfinished_file_and_leaves_a_finished_one(tmp_path: Path, backend) -> None:
    data = lazy_run(2 * MIB)
    writer = new_writer(backend)
    job = writer.start(data.plan(), str(tmp_path / "unfinished"))
    del job
    assert not (tmp_path / "unfinished").exists()
    job = writer.start(data.plan(), str(tmp_path / "finished"))
    assert job.wait()
    job.finish(header=HEADER, trailer=b"")
    job.abort()
    assert job.wait()
    with pytest.raises(RuntimeError, match="finished already"):
        job.finish(header=HEADER, trailer=b"")
    del job
    check_file(tmp_path / "finished", data)


@each_backend
def test_memory_that_vanished_fails_the_job_and_not_the_process(tmp_path: Path, backend) -> None:
    for place in (0, 64):
        memory = mmap.mmap(-1, 4 * MIB)
        plan = native.WritePlan(
            offsets=np.array([ALIGN], dtype=np.uint64),
            addresses=np.array([np.frombuffer(memory, np.uint8).ctypes.data + place], dtype=np.uint64),
            nbytes=np.array([3 * MIB], dtype=np.uint64),
            eager=np.zeros(1, dtype=np.uint8),
            data_start=ALIGN,
            data_end=ALIGN + 3 * MIB,
            align=ALIGN,
        )
        writer = new_writer(backend)
        memory.close()
        job = writer.start(plan, str(tmp_path / f"{place}"))
        job.release()
        with pytest.raises(OSError, match="memory of extent 0, which is no longer mapped") as failure:
            job.wait()
        assert failure.value.errno == errno.EFAULT


def test_a_ring_that_fails_fails_the_jobs_and_not_the_process(tmp_path: Path) -> None:
    if native.probe_io_uring():
        pytest.skip(native.probe_io_uring())
    before = rings()
    writer = new_writer("io_uring", delay_us=200)
    (ring,) = rings() - before
    data = lazy_run(8 * MIB)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    while job.stats["bytes_direct"] == 0:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, ring)
    os.close(null)
    with pytest.raises(OSError, match="write of"):
        job.wait()
    job.abort()
    late = writer.start(data.plan(), str(tmp_path / "late"))
    late.release()
    with pytest.raises(OSError, match="write of"):
        late.wait()
    assert writer.budget_free_bytes() == LEAST_BUDGET
    writer.close()


def rings() -> set[int]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "io_uring" in str(descriptor.readlink()):
                found.add(int(descriptor.name))
        except FileNotFoundError:
            continue
    return found
