"""Writers and jobs end cleanly: by close, by their last reference, in a forked child, and under threads."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from native_helpers import (
    HEADER,
    MIB,
    Piece,
    check_file,
    each_backend,
    extents,
    lazy_run,
    new_writer,
)
from places import SUPPORT

import native


@each_backend
def test_close_fails_what_is_not_prepared_and_keeps_what_is_written(tmp_path: Path, backend) -> None:
    done, open_ = lazy_run(MIB, seed=1), lazy_run(16 * MIB, seed=2)
    writer = new_writer(backend, delay_us=300, depth=1)
    jobs = [writer.start(data.plan(), str(tmp_path / f"{i}")) for i, data in enumerate((done, open_))]
    assert jobs[0].wait()
    writer.close()
    writer.close()
    jobs[0].finish(header=HEADER, trailer=b"")
    check_file(tmp_path / "0", done)
    jobs[1].release()
    with pytest.raises(OSError, match="close of the writer") as failure:
        jobs[1].wait()
    assert failure.value.errno == errno.ECANCELED
    with pytest.raises(RuntimeError, match="writer is closed: nothing was written to"):
        writer.start(done.plan(), str(tmp_path / "2"))
    assert not (tmp_path / "2").exists()


@each_backend
@pytest.mark.parametrize("turn", range(5))
def test_close_from_another_thread_ends_start_and_release(tmp_path: Path, backend, turn) -> None:
    writer = new_writer(backend, delay_us=3000, depth=1 + turn)
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
        assert "close of the writer" in outcome or "writer is closed" in outcome


def outcome_of(job: native.WriteJob) -> str:
    try:
        return str(job.wait())
    except OSError as error:
        return str(error)


@each_backend
def test_the_last_reference_may_fall_in_any_order(tmp_path: Path, backend) -> None:
    """The core's threads may drop a plan or a job last; taking the GIL then would hang the writer's destructor."""
    for turn in range(30):
        writer = new_writer(backend, reorder=True)
        data = lazy_run(2 * MIB)
        job = writer.start(data.plan(), str(tmp_path / f"{turn}"))
        del writer
        del job
    assert list(tmp_path.iterdir()) == []


@each_backend
def test_threads_of_the_core_leave_signals_to_the_others(tmp_path: Path, backend) -> None:
    """Otherwise a Ctrl-C may go to one of them and not wake the main thread."""
    before = threads()
    writer = new_writer(backend, depth=3)
    while len(ours := threads().items() - before.items()) < (3 if backend == "posix" else 1):
        pass
    for _, blocked in ours:
        assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ))
        assert not blocked >> (signal.SIGSEGV - 1) & 1
    writer.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def threads() -> dict[str, int]:
    """Return the signals that each of this process's threads blocks.

    Threads that block all signals are left out: the kernel's own workers of a ring, and threads that libc is still
    starting.
    """
    everything = ~(1 << (signal.SIGKILL - 1) | 1 << (signal.SIGSTOP - 1)) & (1 << 64) - 1
    blocked = {}
    for path in Path("/proc/self/task").glob("*/status"):
        try:
            status = dict(line.split(":\t", 1) for line in path.read_text(encoding="utf-8").splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        blocked[path.parent.name] = int(status["SigBlk"], 16)
    return {thread: mask for thread, mask in blocked.items() if mask != everything}


def test_threads_that_cannot_be_started_are_an_error(tmp_path: Path) -> None:
    script = """
        import native, resource, threading
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
        try:
            native.Writer(backend="posix", budget_bytes=8 << 20, block_bytes=1 << 20, depth=1000)
        except OSError as error:
            print("refused:", error)
        """
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.startswith("refused:")


@each_backend
def test_a_forked_child_gets_errors_and_leaves_the_parents_file(tmp_path: Path, backend) -> None:
    data = lazy_run(4 * MIB)
    writer = new_writer(backend, delay_us=300)
    job = writer.start(data.plan(), str(tmp_path / "f"))
    messages, told = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [
            job.release,
            job.released,
            job.wait,
            job.checksums,
            lambda: job.finish(header=HEADER, trailer=b""),
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
        own = new_writer(backend)
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
    job.finish(header=HEADER, trailer=b"")
    check_file(tmp_path / "f", data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f"]


@pytest.mark.guards("The process keeps its life")
@each_backend
@pytest.mark.parametrize("written", ["written", "writing"])
def test_a_forked_child_exits_without_hang(tmp_path: Path, backend, written) -> None:
    """The child goes through the interpreter's own exit, with the writer and a job still alive."""
    script = """
        import os, sys
        import native, native_helpers as h
        writer = native.Writer(backend=sys.argv[1], budget_bytes=h.LEAST_BUDGET, block_bytes=h.BLOCK,
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
        job.finish(header=h.HEADER, trailer=b"")
        """
    here = str(SUPPORT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), backend, tmp_path / "f", written],
        env=environment,
        timeout=60,
        check=True,
    )
    check_file(tmp_path / "f", lazy_run(4 * MIB))


@pytest.mark.guards("Memory stays within the budget")
@each_backend
def test_a_forked_child_does_not_have_the_budget(tmp_path: Path, backend: str) -> None:
    """A ring's registered memory would be copied at every fork, for each worker of a DataLoader. The child ends through
    the interpreter's own exit."""
    script = """
        import gc, os, sys
        import native, native_helpers as h

        def private_bytes():
            with open("/proc/self/smaps_rollup") as file:
                fields = dict(line.split(":") for line in file.readlines()[1:])
            return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty"))

        data = h.lazy_run(4 << 20, place="odd")
        writer = native.Writer(backend=sys.argv[1], budget_bytes=128 << 20)
        jobs = [writer.start(data.plan(), f"{sys.argv[2]}/{name}") for name in "ab"]
        child = os.fork()
        if child == 0:
            del jobs
            gc.collect()
            print(private_bytes(), flush=True)
            sys.exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for job, name in zip(jobs, "ab"):
            job.release()
            assert job.wait()
            job.finish(header=h.HEADER, trailer=b"")
        assert status == 7, status
        """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), backend, tmp_path],
        env=environment,
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(run.stdout) < 32 << 20
    for name in "ab":
        check_file(tmp_path / name, lazy_run(4 * MIB, place="odd"))


@each_backend
def test_closing_gives_the_budget_back_to_the_host(backend: str) -> None:
    """This holds also while the closed writer is still referred to."""
    budget = 256 << 20
    before = resident_bytes()
    writer = native.Writer(backend=backend, budget_bytes=budget)
    assert resident_bytes() - before > budget // 2
    writer.close()
    assert resident_bytes() - before < budget // 2
    assert writer.budget_free_bytes() == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


IN_THE_MIDDLE = """
import threading, time
import numpy as np
import native
data = np.ones(64 << 20, np.uint8)
def work():
    while True:
        native.checksum(data)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.guards("The process keeps its life")
def test_a_process_ends_while_daemon_threads_are_in_native_code():
    done = subprocess.run([sys.executable, "-c", IN_THE_MIDDLE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


AT_THE_END = """
import native
class Late:
    def __del__(self, checksum=native.checksum):
        print(len(checksum(bytes(1 << 20))))
late = Late()
"""


def test_the_thread_that_ends_the_interpreter_may_call_native_code():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "16")
