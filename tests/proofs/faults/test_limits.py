"""A process at its limits, and a folder that is gone or read-only: a named error, and the next snapshot is good."""

import contextlib
import errno
import os
import resource
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from capture_helpers import assert_same, committed_steps, make, one_step, reference

import capture
import native
from catalog.errors import SetupError, SnapshotError
from catalog.history import History
from catalog.verify import verify

BACKENDS = ["posix", *(["io_uring"] if not native.probe_io_uring() else [])]


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let the process open no file more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, descriptors())) + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def away(root: Path) -> Iterator[None]:
    """Let the history's folder be gone."""
    root.rename(root.with_name("away"))
    yield
    root.with_name("away").rename(root)


@contextmanager
def read_only(root: Path) -> Iterator[None]:
    """Let the history's folder be one of a file system that can't be written to; its lock stays open."""
    _mount("--bind", root, root)
    try:
        _mount("-o", "remount,ro,bind", root)
        yield
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def _require_mounts(folder: Path) -> None:
    try:
        with read_only(folder):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting needs root: {error.stderr.decode().strip()}")


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("trouble", "number"),
    [(no_descriptors, errno.EMFILE), (away, errno.ENOENT), (read_only, errno.EROFS)],
    ids=["RLIMIT_NOFILE", "gone", "read-only"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_in_trouble_is_named_and_the_next_is_good(
    history: Path, backend: str, trouble: Callable[..., AbstractContextManager[None]], number: int
) -> None:
    if trouble is read_only:
        _require_mounts(history.parent)
    model, optimizer = make(64)
    session = capture.enable(
        model, optimizer=optimizer, every=1, history=history, backend=backend, budget_bytes=16 << 20, stats_every=0
    )
    _settle(session)
    before, threads = descriptors(), threading.active_count()
    with trouble() if trouble is no_descriptors else trouble(history):
        one_step(model, optimizer)
        with pytest.raises(SnapshotError, match=rf"step 1 of run {session.run} failed: .*{os.strerror(number)}"):
            session.wait()
    one_step(model, optimizer)
    state = reference(model, optimizer)
    _settle(session)
    assert len(descriptors()) <= len(before)
    assert threading.active_count() <= threads
    session.close()
    assert all(os.strerror(number) in str(failure) for failure in session.failures)
    assert committed_steps(history, session.run) == [0, 2]
    assert_same(capture.restore(f"{session.run}:2", history=history), state)
    assert verify(History.open(history)) == []


def _settle(session: capture.Session) -> None:
    """Return once all is committed, the index closed and every thread of a snapshot at its end. The journal may say
    late that it could not be written during the trouble."""
    with contextlib.suppress(SnapshotError):
        session.wait()
    while session._committer._under_way is not None or "dshistory-changes" in {t.name for t in threading.enumerate()}:
        time.sleep(0.001)


@pytest.mark.guards("A full or failing disk costs that snapshot only")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_budget_that_the_host_refuses_is_named_by_enable(history: Path, backend: str) -> None:
    """Nothing is left of the attempt, and a smaller budget works."""
    model, optimizer = make(64)
    before, threads = len(descriptors()), threading.active_count()
    with pytest.raises(SetupError, match=rf"{backend} writer with budget_bytes={1 << 47}.*Cannot allocate memory"):
        capture.enable(model, optimizer=optimizer, every=1, history=history, backend=backend, budget_bytes=1 << 47)
    assert (len(descriptors()), threading.active_count()) == (before, threads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture.enable(
            model, optimizer=optimizer, every=1, history=history, backend=backend, budget_bytes=16 << 20
        ) as session:
            one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1]
