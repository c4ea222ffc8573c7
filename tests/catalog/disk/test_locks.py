"""A file lock has one holder, in this process or another, and a dead holder releases it."""

import os
import subprocess
import sys

import pytest

from catalog.disk import locks


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_one_holder_at_a_time(path, monkeypatch):
    monkeypatch.setattr(locks, "_PROBE_PATIENCE_S", 0.0)
    held = locks.take_lock(path)
    assert locks.is_locked(path)
    assert locks.try_lock(path) is None
    assert locks.take_lock(path) is None
    locks.free_lock(held)
    assert not locks.is_locked(path)
    locks.free_lock(locks.take_lock(path))


def test_a_dead_process_holds_nothing(path):
    program = "import sys\nfrom pathlib import Path\nfrom catalog.disk.locks import take_lock\n"
    program += "take_lock(Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()\n"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert locks.is_locked(path)
    holder.kill()
    holder.communicate()
    assert not locks.is_locked(path)


def test_a_forked_child_does_not_keep_the_lock(path):
    """A data loader's worker may live longer than the training that forked it."""
    reading, writing = os.pipe()
    held = locks.take_lock(path)
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    locks.free_lock(held)
    free = not locks.is_locked(path)
    os.close(writing)
    os.waitpid(child, 0)
    assert free
