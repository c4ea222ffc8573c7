"""The turnstile: readers together, a writer alone, and a waiting writer goes before readers who come later."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from catalog.index import fair_lock
from catalog.index.fair_lock import IndexBusyError, Turnstile

LONG_S = 60.0


@pytest.fixture
def gate(tmp_path):
    return Turnstile(gate=tmp_path / "gate", room=tmp_path / "room")


def refused(context):
    with pytest.raises(IndexBusyError), context:
        pass


def test_readers_are_in_the_room_together(gate):
    with gate.reading(patience_s=0), gate.reading(patience_s=0), gate.reading(patience_s=0):
        pass


def test_a_writer_is_alone(gate):
    with gate.writing(patience_s=0):
        refused(gate.reading(patience_s=0))
        refused(gate.writing(patience_s=0))
    with gate.reading(patience_s=0):
        refused(gate.writing(patience_s=0))
    with gate.writing(patience_s=0):
        pass


def test_a_writer_that_gave_up_lets_readers_in_again(gate):
    with gate.reading(patience_s=0):
        refused(gate.writing(patience_s=0.01))
        with gate.reading(patience_s=0):
            pass


def test_a_waiting_writer_goes_before_readers_who_come_later(gate, tmp_path):
    """Without the gate the room would never be empty: readers that overlap starve the writer."""
    entered = threading.Event()

    def write():
        with gate.writing(patience_s=LONG_S):
            entered.set()

    with ExitStack() as early:
        early.enter_context(gate.reading(patience_s=0))
        writer = threading.Thread(target=write)
        writer.start()
        waiting = any(not _can_read(gate) for _ in range(20_000))
        assert waiting
        assert not entered.is_set()
        refused(gate.reading(patience_s=0))
    with gate.reading(patience_s=LONG_S):
        assert entered.is_set()
    writer.join()


def _can_read(gate):
    try:
        with gate.reading(patience_s=0):
            return True
    except IndexBusyError:
        return False


def test_overlapping_readers_do_not_starve_a_writer(gate):
    """Four readers who come back at once, so that the room is never empty by itself."""
    stop = threading.Event()

    def read():
        while not stop.is_set():
            with gate.reading(patience_s=LONG_S):
                pass

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            with gate.writing(patience_s=LONG_S):
                pass
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def test_a_killed_holder_holds_nothing(gate, tmp_path):
    program = (
        "import sys, signal\nfrom pathlib import Path\nfrom catalog.index.fair_lock import Turnstile\n"
        "with Turnstile(gate=Path(sys.argv[1]), room=Path(sys.argv[2])).writing(patience_s=60):\n"
        "    print('in', flush=True)\n    signal.pause()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "gate"), str(tmp_path / "room")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "in\n"
    refused(gate.reading(patience_s=0))
    holder.kill()
    holder.communicate()
    with gate.writing(patience_s=LONG_S):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_counts_as_busy(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    refused(Turnstile(gate=folder / "gate", room=folder / "room").reading(patience_s=0))


def test_public_names():
    assert sorted(fair_lock.__all__) == ["IndexBusyError", "Turnstile"]
