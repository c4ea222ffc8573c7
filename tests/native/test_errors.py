"""When a write fails, the error says what, where and why, nothing is left behind, and no call hangs."""

import errno
import mmap
import os
import platform
import resource
import subprocess
import sys
import textwrap
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
    Extents,
    Piece,
    check_file,
    each_backend,
    extents,
    lazy_run,
    memory_to_unmap,
    new_writer,
)
from places import SUPPORT

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
        memory = memory_to_unmap()
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


@pytest.mark.guards("The training goes on")
@each_backend
def test_memory_that_vanishes_while_it_is_read_fails_the_job_and_not_the_process(tmp_path: Path, backend) -> None:
    """A child process unmaps memory in the middle of many jobs; a signal would end it."""
    script = """
        import errno, mmap, sys, threading, time
        import numpy as np
        import native, native_helpers as h

        SIZE = 24 << 20
        writer = native.Writer(backend=sys.argv[1], budget_bytes=64 << 20)
        source = np.full(SIZE, 7, np.uint8)
        failed = 0
        for turn in range(30):
            memory = mmap.mmap(-1, SIZE)
            memory[:] = source
            pieces = turn % 3 == 2  # many small extents, gathered by one call
            place = 4096 * (turn % 3 == 0) + 64 * (turn % 3 == 1)
            address = np.frombuffer(memory, np.uint8).ctypes.data + place
            nbytes = np.full(5000 if pieces else 1, 4000 if pieces else SIZE - 8192, np.uint64)
            at = np.concatenate([[0], np.cumsum(nbytes)[:-1]]).astype(np.uint64)
            end = 4096 + -(-int(nbytes.sum()) // 4096) * 4096
            plan = native.WritePlan(
                offsets=4096 + at, addresses=address + at, nbytes=nbytes, eager=np.zeros(len(at), np.uint8),
                data_start=4096, data_end=end, align=4096)
            job = writer.start(plan, f"{sys.argv[2]}/{turn}")
            other = threading.Thread(target=job.release)
            other.start()
            time.sleep(0.0003 * (turn % 8))
            memory.close()
            other.join()
            try:
                job.wait()
            except OSError as error:
                assert error.errno == errno.EFAULT, error
                failed += 1
            job.abort()
        print(failed)
        """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), backend, tmp_path],
        env=environment,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 5


@pytest.mark.guards("The training goes on")
def test_memory_that_vanishes_while_it_is_hashed_is_an_error() -> None:
    script = """
        import errno, mmap, threading, time
        import numpy as np
        import native

        SIZE = 24 << 20
        failed = 0
        for turn in range(30):
            memory = mmap.mmap(-1, SIZE)
            memory[::4096] = b"x" * (SIZE // 4096)
            address = np.array([np.frombuffer(memory, np.uint8).ctypes.data], np.uint64)

            def hash_():
                global failed
                try:
                    native.checksum_memory(addresses=address, nbytes=np.array([SIZE], np.uint64))
                except OSError as error:
                    assert error.errno == errno.EFAULT
                    failed += 1

            other = threading.Thread(target=hash_)
            other.start()
            time.sleep(0.0003 * (turn % 8))
            memory.close()
            other.join()
        print(failed)
        """
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)], timeout=60, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 5


def test_a_file_in_memory_that_is_cut_fails_the_job_and_not_the_process(tmp_path: Path) -> None:
    """Reading such a mapping directly would raise SIGBUS, although every page is mapped."""
    with (tmp_path / "weights").open("w+b") as file:
        file.truncate(4 * MIB)
        memory = mmap.mmap(file.fileno(), 4 * MIB)
        file.truncate(MIB)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        with pytest.raises(OSError, match="no longer mapped") as failure:
            native.checksum_memory(addresses=np.array([address], np.uint64), nbytes=np.array([4 * MIB], np.uint64))
    assert failure.value.errno == errno.EFAULT


@each_backend
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names a system call of x86_64 by its number")
def test_a_host_that_forbids_the_kernels_copies_gets_the_same_file(tmp_path: Path, backend) -> None:
    """Old container runtimes forbid process_vm_readv and process_vm_writev by seccomp; memory that is gone is an error
    there too."""
    script = """
        import ctypes, errno, struct, sys
        import numpy as np
        import native, native_helpers as h

        LOAD_NUMBER, EQUAL, RETURN = 0x20, 0x15, 0x06
        PROCESS_VM_READV, PROCESS_VM_WRITEV = 310, 311
        steps = [(LOAD_NUMBER, 0, 0, 0), (EQUAL, 1, 0, PROCESS_VM_READV), (EQUAL, 0, 1, PROCESS_VM_WRITEV),
                 (RETURN, 0, 0, 0x00050000 | errno.EPERM), (RETURN, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        filter_ = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, filter_) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
        local = struct.pack("PN", ctypes.addressof(code), 8)
        assert libc.process_vm_readv(libc.getpid(), local, 1, local, 1, 0) == -1
        assert libc.process_vm_writev(libc.getpid(), local, 1, local, 1, 0) == -1

        data = h.extents([h.Piece(2 << 20, 0, "congruent", False), h.Piece(5000, 3, "odd", False)])
        job = h.new_writer(sys.argv[1]).start(data.plan(), sys.argv[2])
        job.release()
        assert job.wait()
        assert job.checksums() == b"".join(map(native.checksum, data.contents()))
        job.finish(header=h.HEADER, trailer=b"")
        memory = h.memory_to_unmap()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        memory.close()
        try:
            native.checksum_memory(addresses=np.array([address], np.uint64), nbytes=np.array([1 << 20], np.uint64))
        except OSError as error:
            assert error.errno == errno.EFAULT
        else:
            raise AssertionError("memory that is gone was read")
        """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), backend, tmp_path / "f"],
        env=environment,
        timeout=60,
        check=True,
    )
    check_file(tmp_path / "f", extents([Piece(2 * MIB, 0, "congruent", False), Piece(5000, 3, "odd", False)]))


needs_io_uring = pytest.mark.skipif(native.probe_io_uring() != "", reason="no io_uring here")


@needs_io_uring
def test_a_ring_that_fails_costs_its_job_and_the_next_job_gets_a_new_one(tmp_path: Path) -> None:
    others, data = rings(), lazy_run(8 * MIB)
    writer = new_writer("io_uring", delay_us=200)
    for turn in range(2):
        break_ring(writer, data, tmp_path / f"broken-{turn}", others)
        late = writer.start(data.plan(), str(tmp_path / f"late-{turn}"))
        late.release()
        assert late.wait()
        late.finish(header=HEADER, trailer=b"")
        check_file(tmp_path / f"late-{turn}", data)
    assert writer.budget_free_bytes() == LEAST_BUDGET
    writer.close()


@needs_io_uring
def test_jobs_fail_as_long_as_no_new_ring_can_be_made(tmp_path: Path) -> None:
    others, data = rings(), lazy_run(8 * MIB)
    writer = new_writer("io_uring", delay_us=200)
    break_ring(writer, data, tmp_path / "broken", others)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))  # the job's file takes the last descriptor
    try:
        late = writer.start(data.plan(), str(tmp_path / "late"))
        late.release()
        with pytest.raises(OSError, match="write of"):
            late.wait()
        late.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    later = writer.start(data.plan(), str(tmp_path / "later"))
    later.release()
    assert later.wait()
    later.abort()
    assert writer.budget_free_bytes() == LEAST_BUDGET
    writer.close()


def break_ring(writer: native.Writer, data: Extents, path: Path, others: set[int]) -> None:
    """Take the ring from under the writer, in the middle of a job, which fails; the rings of `others` stay."""
    (ring,) = rings() - others
    job = writer.start(data.plan(), str(path))
    while job.stats["bytes_direct"] == 0:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, ring)
    os.close(null)
    with pytest.raises(OSError, match="write of"):
        job.wait()
    job.abort()


def rings() -> set[int]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "io_uring" in str(descriptor.readlink()):
                found.add(int(descriptor.name))
        except FileNotFoundError:
            continue
    return found
