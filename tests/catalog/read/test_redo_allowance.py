"""A hostile record of a redo log is refused before any memory is taken for it."""

import pytest
from redo_helpers import add

from catalog.errors import FormatError
from catalog.format.redo_reader import read_redo_segment
from catalog.format.redo_segment import RedoFlat, RedoTensor, RedoWrites, redo_segments
from catalog.format.redo_writer import RedoFileWriter
from catalog.paths import HistoryPaths
from catalog.read.redo import RedoRecord
from catalog.read.redo_allowance import MOST_MORE_BYTES, RedoAllowance, require_fitting_flats

ZEROS = memoryview(bytes(8 << 20))
WEIGHT = RedoTensor("gradient", "weight", "F32", (2, 3))
LARGE = 32 * len(ZEROS)


def records(tmp_path, *steps):
    """Return the records of a segment with these tensors, all zeros, which takes hardly any disk."""
    paths = HistoryPaths(tmp_path)
    paths.run_dir("run-a").mkdir(parents=True)
    writer = RedoFileWriter(paths, "run-a", 0, {}, RedoWrites((("weight",),)))
    for number, tensors in enumerate(steps, start=1):
        for tensor, nbytes in tensors:
            for at in range(0, nbytes, len(ZEROS)):
                add(writer, tensor, ZEROS[: nbytes - at])
        writer.end_step(number, groups=[], broken=None)
    writer.publish()
    (name,) = redo_segments(paths, "run-a")
    path = paths.redo_dir("run-a") / name.name
    assert path.stat().st_size < 100_000
    segment = read_redo_segment(path, run="run-a")
    return [RedoRecord(segment, step) for step in segment.steps]


def table(name, nbytes):
    return RedoTensor("buffer", name, "U8", (nbytes,)), nbytes


CASES = {
    "a gradient of another shape": (
        [[(RedoTensor("gradient", "weight", "F32", (LARGE // 4,)), LARGE)]],
        rf"step 1: gradient of 'weight': is F32 of shape \[{LARGE // 4}\], where the checkpoint has F32 of shape",
    ),
    "a gradient of another dtype": (
        [[(RedoTensor("gradient", "weight", "F64", (2, 3)), 48)]],
        r"is F64 of shape \[2, 3\], where the checkpoint has F32",
    ),
    "a gradient of nothing": (
        [[(RedoTensor("gradient", "other", "F32", (2, 3)), 24)]],
        "gradient of 'other': .* has no such tensor",
    ),
    "twice": ([[(WEIGHT, 24), table("mean", 8), (WEIGHT, 24)]], "gradient of 'weight': is there twice"),
    "twice in two forms": ([[table("mean", 8), table("mean", 9)]], "buffer of 'mean': is there twice"),
    "large buffers": (
        [[table(f"mean{i}", LARGE) for i in range(2)]],
        f"step 1: the buffers and objects .* take {2 * LARGE} bytes, {MOST_MORE_BYTES + 8} are allowed",
    ),
    "new buffers at every step": ([[table(f"mean{step}", LARGE // 2)] for step in range(3)], "step 3: the buffers"),
    "large objects": ([[(RedoTensor("object", "ema", "U8", (2 * LARGE,)), 2 * LARGE)]], "step 1: the buffers"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_training_records_is_refused(tmp_path, case):
    steps, message = CASES[case]
    *before, last = records(tmp_path, *steps)
    allowance = RedoAllowance({"weight": ("F32", (2, 3))}, buffer_bytes=8)
    for record in before:
        allowance.admit(record)
    with pytest.raises(FormatError, match=message):
        allowance.admit(last)


def test_what_a_training_records_is_admitted(tmp_path):
    grown = [[(WEIGHT, 24), table("mean", 8 + step), (RedoTensor("object", "rng", "U8", (5,)), 5)] for step in range(5)]
    allowance = RedoAllowance({"weight": ("F32", (2, 3))}, buffer_bytes=8)
    for record in records(tmp_path, *grown, [table("mean", LARGE)], [table("mean", LARGE)]):
        allowance.admit(record)


def test_flat_tensors_are_bounded_together(tmp_path):
    """Each of these would do by itself."""
    flats = [RedoFlat(f"flat {i}", "F32", (1_000_000,), "partitioned", False, ()) for i in range(4)]
    require_fitting_flats(flats[:3], elements=1_000_000, where="the redo log of run a")
    with pytest.raises(FormatError, match=r"run a: its flat tensors have 4000000 elements together, .* have 1000000, "):
        require_fitting_flats(flats, elements=1_000_000, where="the redo log of run a")
