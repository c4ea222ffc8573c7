"""How the writer fails: the error says what, where and why, nothing is left behind, and nobody hangs."""

import errno
import mmap
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from native_helpers import ALIGN, BLOCK, HEADER, LEAST_BUDGET, Piece, arena, extents, landed, lazy_run

import native

MIB = 1 << 20


@pytest.fixture(params=["io_uring", "posix"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "io_uring" and native.probe_io_uring():
        pytest.skip(native.probe_io_uring())
    return request.param


def engine(backend: str, *, budget_bytes: int = LEAST_BUDGET, depth: int = 4, **faults: int) -> native.Engine:
    return native.Engine(
        backend=backend,
        budget_bytes=budget_bytes,
        block_bytes=BLOCK,
        depth=depth,
        faults=native.Faults(**faults) if faults else None,
    )


def plan_of(**changes: object) -> native.WritePlan:
    """A plan of two extents of 100 bytes, with some columns changed."""
    memory = arena(ALIGN)
    columns: dict[str, object] = {
        "offsets": np.array([ALIGN, ALIGN + 100], dtype=np.uint64),
        "addresses": np.array([memory.ctypes.data, memory.ctypes.data + 100], dtype=np.uint64),
        "nbytes": np.array([100, 100], dtype=np.uint64),
        "eager": np.array([1, 0], dtype=np.uint8),
        "data_start": ALIGN,
        "data_end": 2 * ALIGN,
        "align": ALIGN,
    }
    return native.WritePlan(**(columns | changes))


# Failures of the device


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("place", ["congruent", "odd"])
@pytest.mark.parametrize("fail_after", [0, 7])
def test_a_failed_write_is_told_by_wait_with_its_place(tmp_path: Path, backend, code, place, fail_after) -> None:
    data = lazy_run(4 * MIB, place=place)
    path = tmp_path / "f"
    writer = engine(backend, fail_after=fail_after, errno=code, depth=1)
    job = writer.start(data.plan(), str(path))
    assert job.release() >= 0
    assert job.released()
    with pytest.raises(OSError) as failure:
        job.wait()
    assert failure.value.errno == code
    assert failure.value.filename == str(path)
    assert os.strerror(code) in str(failure.value)
    assert f"write of {BLOCK} bytes at offset {ALIGN + fail_after * BLOCK}" in str(failure.value)
    for call in (job.checksums, lambda: job.finish(header=HEADER, tail=b""), job.wait):
        with pytest.raises(OSError, match="write of") as again:
            call()
        assert again.value.errno == code
    assert path.exists()
    job.abort()
    job.abort()
    assert not path.exists()
    assert writer.budget_free_bytes() == LEAST_BUDGET


def test_a_failure_while_eager_bytes_wait_for_room_does_not_hang_start(tmp_path: Path, backend) -> None:
    data = extents([Piece(4 * MIB, 0, "odd", True)])
    job = engine(backend, fail_after=3).start(data.plan(), str(tmp_path / "f"))
    with pytest.raises(OSError, match="write of") as failure:
        job.wait()
    assert failure.value.errno == errno.EIO


def test_one_jobs_failure_leaves_the_others_alone(tmp_path: Path, backend) -> None:
    good, bad = lazy_run(2 * MIB, seed=1), lazy_run(2 * MIB, seed=2)
    writer = engine(backend)
    jobs = [writer.start(data.plan(), str(tmp_path / name)) for data, name in ((bad, "bad"), (good, "good"))]
    jobs[0].abort()
    jobs[1].release()
    assert jobs[1].wait()
    jobs[1].finish(header=HEADER, tail=b"")
    landed(tmp_path / "good", good)
    assert not (tmp_path / "bad").exists()
    with pytest.raises(OSError, match="abort"):
        jobs[0].wait()


def test_abort_in_the_middle_frees_the_budget_and_removes_the_file(tmp_path: Path, backend) -> None:
    writer = engine(backend, delay_us=200)
    for place in ("congruent", "odd"):
        path = tmp_path / place
        data = lazy_run(8 * MIB, place=place)
        job = writer.start(data.plan(), str(path))
        job.abort()
        assert not path.exists()
        assert job.released()
    assert writer.budget_free_bytes() == LEAST_BUDGET


def test_abort_wakes_a_release_that_waits_for_room(tmp_path: Path, backend) -> None:
    data = extents([Piece(32 * MIB, 0, "odd", False)])
    job = engine(backend, delay_us=1000, depth=1).start(data.plan(), str(tmp_path / "f"))
    release = threading.Thread(target=job.release)
    release.start()
    job.abort()
    release.join()
    assert not (tmp_path / "f").exists()


def test_the_destructor_removes_an_unfinished_file_and_leaves_a_finished_one(tmp_path: Path, backend) -> None:
    data = lazy_run(2 * MIB)
    writer = engine(backend)
    job = writer.start(data.plan(), str(tmp_path / "unfinished"))
    del job
    assert not (tmp_path / "unfinished").exists()
    job = writer.start(data.plan(), str(tmp_path / "finished"))
    assert job.wait()
    job.finish(header=HEADER, tail=b"")
    job.abort()
    assert job.wait()
    with pytest.raises(RuntimeError, match="finished already"):
        job.finish(header=HEADER, tail=b"")
    del job
    landed(tmp_path / "finished", data)


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
        writer = engine(backend)
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
    writer = engine("io_uring", delay_us=200)
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


# Files that can't be made, and real limits


def test_an_existing_file_is_refused_and_kept(tmp_path: Path, backend) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="open") as failure:
        engine(backend).start(lazy_run(MIB).plan(), str(path))
    assert failure.value.filename == str(path)
    assert path.read_bytes() == b"mine"


def test_a_missing_folder_is_named(tmp_path: Path, backend) -> None:
    path = tmp_path / "none" / "f"
    with pytest.raises(FileNotFoundError, match="open") as failure:
        engine(backend).start(lazy_run(MIB).plan(), str(path))
    assert failure.value.filename == str(path)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB without O_DIRECT and fallocate: ramfs has no limit, so ext2 in a loop, else skip."""
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(4 * MIB)
    made = (
        subprocess.run(["mkfs.ext2", "-q", "-F", "-m", "0", image], check=False).returncode if os.geteuid() == 0 else 1
    )
    if made or subprocess.run(["mount", "-o", "loop", image, folder], check=False, capture_output=True).returncode:
        pytest.skip("needs root, mkfs.ext2 and a loop device")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_found_by_start_where_space_can_be_reserved(tiny_tmpfs: Path, backend) -> None:
    with pytest.raises(OSError, match="fallocate of") as failure:
        engine(backend).start(lazy_run(3 * MIB).plan(), str(tiny_tmpfs / "f"))
    assert failure.value.errno == errno.ENOSPC
    assert list(tiny_tmpfs.iterdir()) == []


def test_a_disk_that_is_full_for_the_tail_fails_finish(tiny_tmpfs: Path, backend) -> None:
    data = lazy_run(MIB)
    path = tiny_tmpfs / "f"
    job = engine(backend).start(data.plan(), str(path))
    assert job.wait()
    with pytest.raises(OSError, match="write of") as failure:
        job.finish(header=HEADER, tail=b"t" * 2 * MIB)
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.filename == str(path)
    job.abort()
    assert not path.exists()


@pytest.mark.parametrize("place", ["congruent", "odd"])
def test_a_full_disk_is_found_by_a_write_where_space_cannot_be_reserved(mounted: Path, backend, place) -> None:
    data = lazy_run(6 * MIB, place=place)
    path = mounted / "f"
    writer = engine(backend)
    job = writer.start(data.plan(), str(path))
    job.release()
    with pytest.raises(OSError, match="write of") as failure:
        job.wait()
    assert failure.value.errno == errno.ENOSPC
    job.abort()
    assert not path.exists()
    small = lazy_run(MIB, place=place)
    job = writer.start(small.plan(), str(path))
    assert job.wait()
    job.finish(header=HEADER, tail=b"")
    landed(path, small)


def test_a_file_system_without_o_direct_is_written_buffered(tmp_path: Path, backend) -> None:
    folder = tmp_path / "ramfs"
    folder.mkdir()
    mount = ["mount", "-t", "ramfs", "ramfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs root to mount a ramfs")
    try:
        facts = native.probe_file_system(str(folder))
        data = extents([Piece(2 * MIB, 0, "congruent", False), Piece(5000, 3, "odd", False)])
        job = engine(backend, short_write_every=2).start(data.plan(), str(folder / "f"))
        job.release()
        assert job.wait()
        assert job.stats["direct"] == float(facts["direct"])
        job.finish(header=HEADER, tail=b"t" * ALIGN)
        landed(folder / "f", data, tail=b"t" * ALIGN)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_file_size_limit_is_an_error(tmp_path: Path, backend) -> None:
    """Python ignores SIGXFSZ; the soft limit is put back after."""
    data = lazy_run(MIB)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = engine(backend)
    job = writer.start(data.plan(), str(tmp_path / "tail"))
    assert job.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.data_end, before[1]))
    try:
        with pytest.raises(OSError, match="write of") as failure:
            job.finish(header=HEADER, tail=b"t" * ALIGN)
        assert failure.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="fallocate") as failure:
            writer.start(lazy_run(2 * MIB).plan(), str(tmp_path / "f"))
        assert failure.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "f").exists()


# Arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([ALIGN + 100, ALIGN], np.uint64)}, r"extent 1 covers \[4096, 4196\)"),
        ({"offsets": np.array([ALIGN, ALIGN + 99], np.uint64)}, r"extent 1 covers \[4195, 4295\).*\[4196, 8192\)"),
        ({"offsets": np.array([0, ALIGN], np.uint64)}, r"extent 0 covers \[0, 100\)"),
        ({"offsets": np.array([ALIGN, 2 * ALIGN - 1], np.uint64)}, r"extent 1 covers \[8191, 8291\)"),
        ({"nbytes": np.array([100, 2**64 - 1], np.uint64)}, r"extent 1 covers"),
        ({"addresses": np.array([4096, 0], np.uint64)}, r"extent 1 has 100 bytes at address 0"),
        ({"addresses": np.array([2**64 - 50, 1], np.uint64)}, r"extent 0 has 100 bytes at address"),
        ({"eager": np.array([0, 1], np.uint8)}, r"extent 1 is eager but follows a lazy one"),
        ({"eager": np.array([1], np.uint8)}, r"eager has 1 entries where offsets has 2"),
        ({"nbytes": np.array([1], np.uint64)}, r"nbytes has 1 entries where offsets has 2"),
        ({"data_start": 100}, r"data_start 100 and data_end 8192 must be multiples of 4096"),
        ({"data_end": ALIGN + 1}, r"data_end 4097"),
        ({"align": 3000}, r"power of two, not 3000"),
        ({"align": 0}, r"power of two, not 0"),
    ],
)
def test_a_wrong_plan_is_refused_by_value(changes: dict[str, object], message: str) -> None:
    assert plan_of().extents == 2
    with pytest.raises(ValueError, match=message):
        plan_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "aio"}, '"io_uring" or "posix", not "aio"'),
        ({"block_bytes": 5000}, "multiple of 4096 up to 1073741824, not 5000"),
        ({"block_bytes": 0}, "not 0"),
        ({"block_bytes": 2 << 30}, "not 2147483648"),
        ({"depth": 0}, "depth must be between 1 and 1024, not 0"),
        ({"depth": 5000}, "not 5000"),
        ({"budget_bytes": LEAST_BUDGET - 1}, f"{LEAST_BUDGET - 1} bytes is too small.* give at least {LEAST_BUDGET}"),
        ({"budget_bytes": 0}, "0 bytes is too small"),
    ],
)
def test_a_wrong_engine_is_refused_by_value(backend, changes: dict[str, object], message: str) -> None:
    right = {"backend": backend, "budget_bytes": LEAST_BUDGET, "block_bytes": BLOCK, "depth": 2}
    native.Engine(**right).close()
    with pytest.raises(ValueError, match=message):
        native.Engine(**(right | changes))


@pytest.mark.parametrize("block_bytes", [4096, 4 * MIB, 64 * MIB])
def test_the_least_budget_that_the_error_names_suffices(block_bytes: int) -> None:
    for budget_bytes in (0, 2 * block_bytes):
        with pytest.raises(ValueError, match="at least") as failure:
            native.Engine(backend="posix", budget_bytes=budget_bytes, block_bytes=block_bytes, depth=1)
        least = int(str(failure.value).rsplit(" ", 1)[1])
        native.Engine(backend="posix", budget_bytes=least, block_bytes=block_bytes, depth=1).close()


def test_a_plan_coarser_than_the_blocks_is_refused(tmp_path: Path, backend) -> None:
    plan = plan_of(
        data_start=2 * BLOCK, data_end=4 * BLOCK, align=2 * BLOCK, offsets=np.array([2 * BLOCK] * 2) + [0, 100]
    )
    with pytest.raises(ValueError, match=f"blocks of {BLOCK} bytes can't hold a plan aligned to {2 * BLOCK}"):
        engine(backend).start(plan, str(tmp_path / "f"))
    assert not (tmp_path / "f").exists()


def test_wrong_ends_are_refused_by_value(tmp_path: Path, backend) -> None:
    data = lazy_run(MIB)
    job = engine(backend).start(data.plan(), str(tmp_path / "f"))
    assert job.wait()
    with pytest.raises(ValueError, match="header must have 4096 bytes, not 5"):
        job.finish(header=b"short", tail=b"")
    with pytest.raises(ValueError, match="tail a multiple of 4096, not 5"):
        job.finish(header=HEADER, tail=b"short")
    job.finish(header=HEADER, tail=b"")
    landed(tmp_path / "f", data)


# Ends of life


def test_close_fails_what_is_not_prepared_and_keeps_what_is_written(tmp_path: Path, backend) -> None:
    done, open_ = lazy_run(MIB, seed=1), lazy_run(16 * MIB, seed=2)
    writer = engine(backend, delay_us=300, depth=1)
    jobs = [writer.start(data.plan(), str(tmp_path / f"{i}")) for i, data in enumerate((done, open_))]
    assert jobs[0].wait()
    writer.close()
    writer.close()
    jobs[0].finish(header=HEADER, tail=b"")
    landed(tmp_path / "0", done)
    jobs[1].release()
    with pytest.raises(OSError, match="close of the engine") as failure:
        jobs[1].wait()
    assert failure.value.errno == errno.ECANCELED
    with pytest.raises(RuntimeError, match="engine is closed: nothing was written to"):
        writer.start(done.plan(), str(tmp_path / "2"))
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("turn", range(5))
def test_close_from_another_thread_ends_start_and_release(tmp_path: Path, backend, turn) -> None:
    writer = engine(backend, delay_us=100, depth=1 + turn)
    lazy, eager = lazy_run(8 * MIB, place="odd"), extents([Piece(8 * MIB, 0, "odd", True)])
    first = writer.start(lazy.plan(), str(tmp_path / "lazy"))
    outcomes: list[str] = []

    def start() -> None:
        try:
            outcomes.append(outcome_of(writer.start(eager.plan(), str(tmp_path / "eager"))))
        except RuntimeError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=work) for work in (first.release, start, writer.close, writer.close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in [outcome_of(first), *outcomes]:
        assert "close of the engine" in outcome or "engine is closed" in outcome


def outcome_of(job: native.WriteJob) -> str:
    try:
        return str(job.wait())
    except OSError as error:
        return str(error)


def test_the_last_reference_may_fall_in_any_order(tmp_path: Path, backend) -> None:
    """The core's threads may drop a plan or a job last; taking the GIL then would hang the engine's destructor."""
    for turn in range(30):
        writer = engine(backend, reorder=True)
        data = lazy_run(2 * MIB)
        job = writer.start(data.plan(), str(tmp_path / f"{turn}"))
        del writer
        del job
    assert list(tmp_path.iterdir()) == []


def test_threads_that_cannot_be_started_are_an_error(tmp_path: Path) -> None:
    script = """
        import native, resource, threading
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
        try:
            native.Engine(backend="posix", budget_bytes=8 << 20, block_bytes=1 << 20, depth=1000)
        except OSError as error:
            print("refused:", error)
        """
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.startswith("refused:")


def test_a_forked_child_is_told_and_leaves_the_parents_file(tmp_path: Path, backend) -> None:
    data = lazy_run(4 * MIB)
    writer = engine(backend, delay_us=300)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    messages, told = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [
            job.release,
            job.released,
            job.wait,
            job.checksums,
            lambda: job.finish(header=HEADER, tail=b""),
            job.abort,
            lambda: job.stats,
            lambda: writer.start(data.plan(), str(tmp_path / "child")),
            writer.budget_free_bytes,
            writer.close,
        ]
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                refused += f"belongs to process {os.getppid()}" in str(error)
        del calls, call, job, writer
        own = engine(backend)
        own_job = own.start(data.plan(), str(tmp_path / "own"))
        refused += own_job.wait()
        own_job.abort()
        own.close()
        os.write(told, bytes([refused]))
        os._exit(0)
    os.close(told)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(messages, 1) == bytes([11])
    os.close(messages)
    job.release()
    assert job.wait()
    job.finish(header=HEADER, tail=b"")
    landed(tmp_path / "f", data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f"]


@pytest.mark.parametrize("written", ["written", "writing"])
def test_a_forked_child_exits_without_hang(tmp_path: Path, backend, written) -> None:
    """Through the interpreter's own exit, with the engine and a job still alive."""
    script = """
        import os, sys
        import native, native_helpers as h
        writer = native.Engine(backend=sys.argv[1], budget_bytes=h.LEAST_BUDGET, block_bytes=h.BLOCK,
                               faults=native.Faults(delay_us=300))
        data = h.lazy_run(4 << 20)
        job = writer.start(data.plan(), sys.argv[2])
        if sys.argv[3] == "written":
            job.wait()
        child = os.fork()
        if child == 0:
            del job
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert job.wait()
        job.finish(header=h.HEADER, tail=b"")
        """
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), backend, tmp_path / "f", written],
        env=environment,
        timeout=60,
        check=True,
    )
    landed(tmp_path / "f", lazy_run(4 * MIB))
