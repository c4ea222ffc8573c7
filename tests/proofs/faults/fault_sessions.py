"""The same work again and again, each time with another call failing: `python fault_sessions.py WORK FOLDER`.

WORK is `training`, captured at every step, `enable`, the beginning of one, or `index`, the registration of a
checkpoint. The program runs with `fault_injector.c` preloaded and prints a line of JSON for each repetition: the call
that failed, with what error, and what is wrong afterwards.
"""

import argparse
import contextlib
import ctypes
import errno
import functools
import gc
import itertools
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from capture_helpers import assert_same, bits, make, one_step, reference
from catalog_helpers import Run, pieces_of

import capture
from catalog.errors import HistoryError, SnapshotError
from catalog.history import History
from catalog.index.index import reindex
from catalog.paths import HistoryPaths, parse_step_dir
from catalog.verify import verify

SHORT = -1
NEVER = -2
"""Not an error: the call does not return for a while."""

WIDTH = 64
PATIENCE_S = 10.0
STEPS = 2
RETRIED = {"write", "pwrite", "pwrite64", "ftruncate", "ftruncate64", "fsync", "fdatasync", "fallocate", "completion"}
"""Half of a write, and a call that a signal interrupts, must not fail a snapshot; Python repeats its own calls."""

Work = Callable[[Path, int, int], None]

injector = ctypes.CDLL(None)
injector.injector_name.restype = ctypes.c_char_p
injector.injector_path.restype = ctypes.c_char_p


class Wrong(AssertionError):
    """What a session with a fault has left that it should not have."""


def main() -> None:
    """Try every fault that the arguments name, until a repetition has no call left to fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["training", "enable", "index"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="posix", help="the writer's: posix or io_uring")
    parser.add_argument("--every", type=int, default=1, help="fail each N-th call only")
    parser.add_argument("--errors", default="EIO", help="names of errno, SHORT or NEVER, with commas")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    work: Work = registration_with_fault
    if arguments.work == "enable":
        work = functools.partial(enable_with_fault, backend=arguments.backend)
    elif arguments.work == "training":
        work = functools.partial(training_with_fault, backend=arguments.backend, expected=plain_training())
    # The first repetition imports what is imported late, and opens what is opened once in a process.
    work(arguments.folder / "first", -1, 0)
    # `enable` looks through all objects that there are: a third of a repetition, for what the imports have made.
    gc.collect()
    gc.freeze()
    for name in arguments.errors.split(","):
        for at in itertools.count(0, arguments.every):
            root = arguments.folder / f"{name}-{at}"
            wrong = None
            try:
                work(root, at, {"SHORT": SHORT, "NEVER": NEVER}.get(name) or getattr(errno, name))
            except (AssertionError, HistoryError, OSError) as error:
                wrong = f"{type(error).__name__}: {error}"
            finally:
                disarm()
            if not failed_call():
                assert wrong is None, f"without any fault: {wrong}"
                break
            print(json.dumps({"at": at, "call": failed_call(), "error": name, "wrong": wrong}), flush=True)
            shutil.rmtree(root, ignore_errors=True)


def registration_with_fault(root: Path, at: int, code: int) -> None:
    """Register a checkpoint while a call on the index fails: a rebuilt index must have it, in the same process."""
    with Run(root) as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
        run.checkpoint(1, pieces_of({"w": b"b"}), register=False)
        arm(HistoryPaths(root).catalog_db, at, code)
        with contextlib.suppress(HistoryError):
            run.register()
        disarm()
        if reindex(HistoryPaths(root)) != 2:
            raise Wrong("the rebuilt index does not have both checkpoints")


def plain_training() -> list[bytes]:
    """Return the weights after each step of the training without capture."""
    model, optimizer = make(WIDTH)
    return [weights_after_step(model, optimizer) for _ in range(STEPS + 1)]


def training_with_fault(root: Path, at: int, code: int, *, backend: str, expected: list[bytes]) -> None:
    """Capture every step of a training whose call number `at` fails. Wrong when the training, the history or the
    process is not as it should be afterwards.
    """
    descriptors, threads = open_descriptors(), threading.active_count()
    model, optimizer = make(WIDTH)
    states: dict[int, Any] = {}
    session = begin(model, optimizer, root, backend)
    states[0] = reference(model, optimizer)
    session.wait()
    arm(root, at, code)
    if code == NEVER:
        threading.Thread(target=answer_late, daemon=True).start()
    for step in range(1, STEPS + 1):
        if weights_after_step(model, optimizer) != expected[step - 1]:
            raise Wrong(f"the weights after step {step} are not those of the training without capture")
        states[step] = reference(model, optimizer)
        with contextlib.suppress(SnapshotError):
            session.wait()
    disarm()
    weights_after_step(model, optimizer)
    states[STEPS + 1] = reference(model, optimizer)
    session.close()
    for failure in session.failures:
        if not isinstance(failure, HistoryError) or session.run not in str(failure):
            raise Wrong(f"a failure that does not name its run: {failure!r}")
    # A call that is answered late, or repeated, has not failed.
    answered = code in (NEVER, errno.EINTR)
    check_history(root, session, states, unsynced=None if answered else step_not_synced())
    require_nothing_open(descriptors, threads)
    if code in (SHORT, errno.EINTR) and failed_call() in RETRIED and session.failures:
        raise Wrong(f"a call that is repeated has failed the snapshot: {session.failures}")
    if code == NEVER and session.failures:
        raise Wrong(f"a call that took its time has failed the snapshot: {session.failures}")


def enable_with_fault(root: Path, at: int, code: int, *, backend: str) -> None:
    """Begin to capture while a call fails: with a named error or without, nothing of it is in the way of the next."""
    descriptors, threads = open_descriptors(), threading.active_count()
    model, optimizer = make(WIDTH)
    arm(root, at, code)
    with contextlib.suppress(HistoryError):
        session = begin(model, optimizer, root, backend)
        one_step(model, optimizer)
        session.close()
    disarm()
    require_nothing_open(descriptors, threads)
    model, optimizer = make(WIDTH)
    session = begin(model, optimizer, root, backend)
    one_step(model, optimizer)
    states = {1: reference(model, optimizer)}
    session.close()
    if session.failures:
        raise Wrong(f"the next session: {session.failures}")
    history = History.open(root)
    if [ref.step for ref in history.checkpoints(session.run)] != [0, 1]:
        raise Wrong("the next session has not committed both steps")
    assert_same(capture.restore(f"{session.run}:1", history=root), states[1])
    problems = verify(history)
    if problems:
        raise Wrong(f"verify: {problems}")


def begin(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path, backend: str) -> capture.Session:
    """Capture a training as every WORK does."""
    return capture.enable(
        model, optimizer=optimizer, every=1, history=root, backend=backend, budget_bytes=16 << 20, stats_every=0
    )


def require_nothing_open(descriptors: list[str], threads: int) -> None:
    """Wrong when there are more threads than before, or more descriptors."""
    ends = time.monotonic() + PATIENCE_S
    while threading.active_count() > threads and time.monotonic() < ends:
        # Some threads end by themselves, right after what they were told to end with.
        time.sleep(0.01)
    if threading.active_count() > threads:
        raise Wrong(f"threads are left: {[thread.name for thread in threading.enumerate()]}")
    if len(open_descriptors()) > len(descriptors):
        raise Wrong(f"descriptors are left: {sorted(set(open_descriptors()) - set(descriptors))}")


def check_history(root: Path, session: capture.Session, states: dict[int, Any], *, unsynced: int | None) -> None:
    """Wrong unless the next step after the fault is there, and every committed one is whole and exact; the step
    `unsynced`, of which a sync has failed, must not be committed.
    """
    history = History.open(root)
    steps = [ref.step for ref in history.checkpoints(session.run)]
    missing = set(states) - set(steps)
    if STEPS + 1 in missing:
        raise Wrong(f"the step after the fault is not committed: {session.failures}")
    if missing and not session.failures:
        raise Wrong(f"steps {sorted(missing)} are not committed, and no failure says so")
    problems = verify(history)
    if problems:
        raise Wrong(f"verify: {problems}")
    if unsynced in steps:
        raise Wrong(f"step {unsynced} is committed, although the sync of {failed_path()} has failed")
    for step in steps:
        assert_same(capture.restore(f"{session.run}:{step}", history=root, verify=False), states[step])
    left = [path for path in root.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    left = [path for path in left if "steps" in path.parts]
    if left:
        raise Wrong(f"temporary files are left: {left}")
    if history.reindex() != len(steps):
        raise Wrong("the index has another number of checkpoints")


def weights_after_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Train one step; return the bits of all weights."""
    one_step(model, optimizer)
    return b"".join(bits(parameter.detach()) for parameter in model.parameters())


def arm(folder: Path, at: int, code: int) -> None:
    """Let the call whose turn is `at` fail with `code`, from now on and counted among those below `folder`."""
    injector.injector_arm(os.fsencode(folder), ctypes.c_long(at), code)


def answer_late() -> None:
    """Let the call that does not return go on, once it is reached and the training has had time to run into it."""
    while injector.injector_armed():
        time.sleep(0.02)
        if failed_call():
            disarm()


def disarm() -> None:
    """Let no call fail any more; `failed_call` stays."""
    injector.injector_disarm()


def failed_call() -> str:
    """Return the name of the call that the injector has failed, "" if none."""
    return injector.injector_name().decode()


def failed_path() -> Path:
    """Return the file or folder of the call that the injector has failed."""
    return Path(injector.injector_path().decode())


def step_not_synced() -> int | None:
    """Return the step whose data or manifest could not be synced: nothing after that says what is on the disk."""
    path = failed_path()
    is_part = path.name.endswith(".tmp") and ("safetensors" in path.name or "manifest" in path.name)
    return parse_step_dir(path.parent.name) if is_part and failed_call() in ("fsync", "fdatasync") else None


def open_descriptors() -> list[str]:
    """Return what the descriptors of this process lead to."""
    folder = Path("/proc/self/fd")
    found = []
    for name in os.listdir(folder):
        try:
            found.append(str((folder / name).readlink()))
        except FileNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
