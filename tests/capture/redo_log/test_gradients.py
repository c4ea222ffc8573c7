"""Gradients are packed beside the training, or at once where nothing is left beside it; the log is the same."""

import mmap

import pytest
import torch
from catalog_helpers import Run, can_be_direct, sizes_written

from capture.redo_log.gradients import Gradients, trains_on_all_cores
from capture.redo_log.redo_log import RedoLog, StepInput
from catalog.disk import direct_file
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import RedoWrites, redo_segments
from catalog.read.redo import RedoRecord
from catalog.retention.redo_segments import segment_bytes

SIZES = (3_000_000, 700, 0, 1, 262_145)


class Updated:
    """What an optimizer updates: parameters that have gradients, and one that has none."""

    are_flat = False

    def __init__(self):
        made = torch.Generator().manual_seed(3)
        self.all = [torch.nn.Parameter(torch.zeros(size)) for size in (*SIZES, 5)]
        for one in self.all[:-1]:
            one.grad = torch.randn(one.shape, generator=made) * 1e-3

    def known_name(self, tensor):
        return f"w{next(at for at, one in enumerate(self.all) if one is tensor)}"

    def is_recorded(self, tensor):
        return True


def taken(run, *, at_once, broken=None):
    """Take the gradients of a step, by two calls; overwrite them; and write the step. Return the log's footer bound."""
    log = RedoLog(run.writers[0], on_full="wait", packs_at_once=at_once)
    updated = Updated()
    step = StepInput({"class": "SGD"}, RedoWrites((("w0",),)), [{}], step=1)
    gradients = Gradients(log, updated)
    gradients.take(step, updated.all[:2])
    gradients.take(step, updated.all[2:])
    expected = {updated.known_name(one): one.grad.numpy().tobytes() for one in updated.all if one.grad is not None}
    for one in updated.all[:-1]:
        one.grad.fill_(-1.0)
    step.broken = broken
    log.add(step)
    log.close()
    return expected


def segment_of(run):
    paths = run.writers[0].paths
    (name,) = redo_segments(paths, "run-a")
    return paths.redo_dir("run-a") / name.name


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_taken_is_what_was_there(tmp_path, at_once):
    with Run(tmp_path / "h") as run:
        expected = taken(run, at_once=at_once)
        segment = read_redo_segment(segment_of(run), run="run-a")
    found = {tensor.name: bytes(content) for tensor, content in RedoRecord(segment, segment.steps[0]).tensors()}
    assert found == expected


def test_the_log_has_the_same_bytes_in_either_way(tmp_path):
    files = []
    for at_once in (False, True):
        with Run(tmp_path / str(at_once)) as run:
            taken(run, at_once=at_once)
            files.append(segment_of(run).read_bytes())
    assert files[0] == files[1]


def test_many_packed_bytes_are_written_from_where_they_were_packed(tmp_path, monkeypatch):
    sizes = sizes_written(monkeypatch)
    with Run(tmp_path / "h") as run:
        taken(run, at_once=True)
        written = segment_of(run).stat().st_size
    if not can_be_direct(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    assert max(sizes) > written - 4 * mmap.PAGESIZE > direct_file._PIECE_BYTES


@pytest.mark.parametrize("at_once", [False, True])
def test_a_broken_step_has_no_gradients(tmp_path, at_once):
    with Run(tmp_path / "h") as run:
        taken(run, at_once=at_once, broken="an edit")
        segment = read_redo_segment(segment_of(run), run="run-a")
        assert segment_bytes(segment_of(run).stat().st_size) == segment_bytes(1)
    assert [(one.broken, list(one.blocks)) for one in segment.steps] == [("an edit", [])]


def module(device):
    return torch.nn.Linear(2, 2, device=device)


@pytest.mark.parametrize(
    ("threads", "ranks", "cores", "expected"), [(2, 1, 2, True), (1, 1, 2, False), (1, 2, 2, True), (4, 2, 16, False)]
)
def test_a_training_takes_all_cores_when_its_threads_are_as_many(monkeypatch, threads, ranks, cores, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert trains_on_all_cores(module("cpu"), world_size=ranks, cores=cores) is expected
    # Cores wait for a device while it computes.
    assert not trains_on_all_cores(module("meta"), world_size=ranks, cores=cores)
