"""What a session writes into its redo log can be read again."""

import json
import threading
import time

import pytest
import torch
from catalog_helpers import Run

from capture.redo_log import redo_log
from capture.redo_log.budget_room import RedoRoom
from capture.redo_log.redo_log import RedoLog, StepInput
from catalog.format import redo_reader, redo_writer
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import RedoTensor, RedoWrites, redo_segments
from catalog.read.redo import RedoRecord, recorded_steps
from catalog.retention.redo_segments import segment_bytes

MOST_FOOTER_BYTES = 5000
NAME = "a." * 200


def step_input(number, *, names=("weight",), rate=0.1):
    tensors = [(RedoTensor("gradient", name, "F32", (3,)), torch.ones(3)) for name in names]
    return StepInput({"class": "SGD"}, RedoWrites((("weight",),)), [{"lr": rate}], tensors=tensors, step=number)


def broken_input(number):
    return StepInput({"class": "SGD"}, RedoWrites((("weight",),)), [{"lr": 0.1}], broken="b" * 300, step=number)


CASES = {
    "many steps": lambda: [step_input(number) for number in range(1, 100)],
    "other tensors at each step": lambda: [step_input(number, names=[f"{NAME}{number}"]) for number in range(1, 30)],
    "many blocks": lambda: [step_input(number, names=[f"{i}" for i in range(12)]) for number in range(1, 10)],
    "other groups at each step": lambda: [step_input(number, rate=[number] * 200) for number in range(1, 20)],
    "reasons": lambda: [broken_input(number) for number in range(1, 30)],
}


@pytest.fixture
def small_footers(monkeypatch):
    for module in (redo_reader, redo_writer):
        monkeypatch.setattr(module, "MAX_JSON_BYTES", MOST_FOOTER_BYTES)
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 3600.0)


def written(run, steps):
    log = RedoLog(run.writers[0], on_full="wait")
    for one in steps:
        log.add(one)
    log.close()
    return run.writers[0].paths


@pytest.mark.parametrize("case", CASES)
def test_a_segment_ends_before_its_footer_is_too_large_for_a_reader(tmp_path, small_footers, case):
    given = CASES[case]()
    steps = [one.step for one in given]
    with Run(tmp_path / "h") as run:
        paths = written(run, given)
    names = redo_segments(paths, "run-a")
    assert 1 < len(names) < len(steps)
    for name in names:
        read_redo_segment(paths.redo_dir("run-a") / name.name, run="run-a")
    assert recorded_steps(paths, "run-a") == steps


def test_a_step_whose_own_footer_is_too_large_is_left_out_alone(tmp_path, small_footers):
    steps = [step_input(number) for number in range(1, 10)]
    steps[4] = step_input(5, names=["a" * (MOST_FOOTER_BYTES + 1)])
    with Run(tmp_path / "h") as run:
        paths = written(run, steps)
        left = [row.detail for row in run.writers[0].journal._rows if row.name == "redo_left_out"]
    assert recorded_steps(paths, "run-a") == [1, 2, 3, 4, 6, 7, 8, 9]
    assert len(left) == 1
    assert f"where {MOST_FOOTER_BYTES} are allowed" in left[0]
    assert list(paths.redo_dir("run-a").glob(".*")) == []


def left_out(run):
    rows = [row for row in run.writers[0].journal._rows if row.name == "redo_left_out"]
    return sorted(step for row in rows for step in range(row.step, json.loads(row.detail)["last"] + 1))


def test_every_step_without_room_is_named_also_after_a_load_that_counts_back(tmp_path):
    room = RedoRoom()
    assert not room.hold(1)
    with Run(tmp_path / "h") as run:
        log = RedoLog(run.writers[0], on_full="wait", room=room)
        with pytest.warns(UserWarning, match="step 10 is not in the redo log"):
            assert log.has_no_room_for(10)
        assert all(log.has_no_room_for(step) for step in (11, 12, 5, 6))
        log.close()
        assert left_out(run) == [5, 6, 10, 11, 12]


def test_the_warning_names_the_first_step_without_room_also_when_there_is_room_again(tmp_path):
    room = RedoRoom()
    with Run(tmp_path / "h") as run:
        log = RedoLog(run.writers[0], on_full="wait", room=room)
        log.add(step_input(1))
        while not log._without_room:
            time.sleep(0.01)
        room.grant(1 << 20)
        log.add(step_input(2))
        while log._without_room:
            time.sleep(0.01)
        assert not room.hold(1 << 30)
        with pytest.warns(UserWarning, match="step 1 is not in the redo log"):
            assert log.has_no_room_for(3)
        log.close()
        assert left_out(run) == [1, 3]


def test_a_log_that_is_given_up_waits_for_no_grant(tmp_path):
    room = RedoRoom()
    room.tell()  # from here on nothing is held before the grant
    with Run(tmp_path / "h") as run:
        log = RedoLog(run.writers[0], on_full="wait", room=room)
        log.add(step_input(1))
        while log._waiting:
            time.sleep(0.01)
        time.sleep(0.1)  # it waits for the grant now
        log.give_up()
        ending = threading.Thread(target=log.close)
        ending.start()
        ending.join(20)
        try:
            assert not ending.is_alive()
        finally:
            room.grant(0)
            ending.join()


def test_a_note_that_takes_the_place_of_a_segment_counts_once(tmp_path):
    room = RedoRoom()
    room.grant(1 << 20)
    with Run(tmp_path / "h") as run:
        log = RedoLog(run.writers[0], on_full="wait", room=room)
        for _ in range(3):
            log.write_now([broken_input(6), broken_input(7)])
        log.close()
        (only,) = run.writers[0].paths.redo_dir("run-a").iterdir()
        assert room.tell()[0] == segment_bytes(only.stat().st_size)


def gradients(*counts):
    made = torch.Generator().manual_seed(7)
    contents = [torch.randn(count, generator=made) * 1e-3 for count in counts]
    return [(RedoTensor("gradient", f"w{i}", "F32", (len(one),)), one) for i, one in enumerate(contents)]


@pytest.mark.parametrize("threads", [1, 4])
def test_a_step_of_any_tensors_is_read_as_it_was_whatever_the_threads(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    given = gradients(3_000_000, *[700] * 300, 0, 1, 262_144, 262_145, 40_000)
    step = StepInput({"class": "SGD"}, RedoWrites((("w0",),)), [{}], tensors=list(given), step=1)
    with Run(tmp_path / "h") as run:
        paths = written(run, [step])
    (name,) = redo_segments(paths, "run-a")
    segment = read_redo_segment(paths.redo_dir("run-a") / name.name, run="run-a")
    found = dict(RedoRecord(segment, segment.steps[0]).tensors())
    assert list(found) == [tensor for tensor, _ in given]
    assert all(found[tensor] == content.numpy().tobytes() for tensor, content in given)
