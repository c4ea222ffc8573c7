"""The fair lock: readers share it, a writer has it alone, and a waiting writer precedes later readers."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from catalog.index import fair_lock
from catalog.index.fair_lock import FairLock, IndexBusyError

LONG_S = 60.0


@pytest.fixture
def lock(tmp_path):
    return FairLock(queue=tmp_path / "queue", access=tmp_path / "access")


def refused(context):
    with pytest.raises(IndexBusyError), context:
        pass


def test_readers_read_together(lock):
    with lock.reading(patience_s=0), lock.reading(patience_s=0), lock.reading(patience_s=0):
        pass


def test_a_writer_is_alone(lock):
    with lock.writing(patience_s=0):
        refused(lock.reading(patience_s=0))
        refused(lock.writing(patience_s=0))
    with lock.reading(patience_s=0):
        refused(lock.writing(patience_s=0))
    with lock.writing(patience_s=0):
        pass


def test_a_writer_that_gave_up_lets_readers_in_again(lock):
    with lock.reading(patience_s=0):
        refused(lock.writing(patience_s=0.01))
        with lock.reading(patience_s=0):
            pass


def test_a_waiting_writer_goes_before_readers_who_come_later(lock, tmp_path):
    """Without the queue lock, overlapping readers would never free the access lock and would starve the writer."""
    entered = threading.Event()

    def write():
        with lock.writing(patience_s=LONG_S):
            entered.set()

    with ExitStack() as early:
        early.enter_context(lock.reading(patience_s=0))
        writer = threading.Thread(target=write)
        writer.start()
        waiting = any(not _can_read(lock) for _ in range(20_000))
        assert waiting
        assert not entered.is_set()
        refused(lock.reading(patience_s=0))
    with lock.reading(patience_s=LONG_S):
        assert entered.is_set()
    writer.join()


def _can_read(lock):
    try:
        with lock.reading(patience_s=0):
            return True
    except IndexBusyError:
        return False


def test_overlapping_readers_do_not_starve_a_writer(lock):
    """Four readers return at once, so that the access lock never becomes free by itself."""
    stop = threading.Event()

    def read():
        while not stop.is_set():
            with lock.reading(patience_s=LONG_S):
                pass

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with lock.writing(patience_s=LONG_S):
                pass
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_killed_holder_holds_nothing(lock, tmp_path):
    program = (
        "import sys, signal\nfrom pathlib import Path\nfrom catalog.index.fair_lock import FairLock\n"
        "with FairLock(queue=Path(sys.argv[1]), access=Path(sys.argv[2])).writing(patience_s=60):\n"
        "    print('in', flush=True)\n    signal.pause()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "queue"), str(tmp_path / "access")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "in\n"
    refused(lock.reading(patience_s=0))
    holder.kill()
    holder.communicate()
    with lock.writing(patience_s=LONG_S):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_counts_as_busy(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    refused(FairLock(queue=folder / "queue", access=folder / "access").reading(patience_s=0))


def test_public_names():
    assert sorted(fair_lock.__all__) == ["FairLock", "IndexBusyError"]
