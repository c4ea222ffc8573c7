"""The golden packed files and redo logs stay readable: every reader gets the very values that were written."""

import shutil
from pathlib import Path

import golden_counted_twice
import golden_indexed
import pytest
from golden_counted_twice import COUNTED_BACK, GRADIENT, gradient
from golden_packed_redo import ALONE, FLATS, KEY, PACKED, TOGETHER, recorded, tensors, write
from places import GOLDEN_COUNTED_TWICE, GOLDEN_INDEXED, GOLDEN_PACKED_REDO

from capture.redo.rebuild import RebuiltSteps
from capture.redo.steps import RedoRef
from catalog.data_files.check_data import check_header
from catalog.data_files.pieces import piece_of
from catalog.data_files.stored_bytes import ReadBuffer
from catalog.errors import MismatchError
from catalog.history import History
from catalog.paths import data_file, packed_file
from catalog.read.checkpoint import read_checkpoint
from catalog.read.redo import RedoChain, RedoRecord, recorded_steps
from catalog.records import CheckpointRef
from catalog.verify import verify

FOLDERS = ("written once", "written today")


@pytest.fixture(scope="module", params=FOLDERS)
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return a copy of the golden history, and one that today's code has written."""
    root = tmp_path_factory.mktemp("golden") / "history"
    if request.param == FOLDERS[0]:
        shutil.copytree(GOLDEN_PACKED_REDO, root)
    else:
        write(root)
    return History.open(root)


@pytest.fixture(scope="module", params=FOLDERS)
def counted_back(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return the same of the golden history whose log has steps that were counted twice."""
    root = tmp_path_factory.mktemp("golden") / "history"
    if request.param == FOLDERS[0]:
        shutil.copytree(GOLDEN_COUNTED_TWICE, root)
    else:
        golden_counted_twice.write(root)
    return History.open(root)


def test_it_verifies(history: History) -> None:
    assert verify(history) == []
    assert not list(history.root.rglob("*.safetensors"))


@pytest.mark.parametrize("step", [KEY, PACKED])
def test_every_packed_tensor_has_its_bytes(history: History, step: int) -> None:
    extents = [one for one in history.extents(CheckpointRef(ALONE, step)) if one.kind == "model"]
    found, _ = ReadBuffer().read(history.root, [piece_of(one) for one in extents])
    read = {one.name: (one.dtype, memory.tobytes()) for one, memory in zip(extents, found, strict=True)}
    assert read == tensors(step)
    assert {one.file for one in extents} == {data_file(ALONE, step, 0)}
    assert (history.root / packed_file(data_file(ALONE, step, 0))).exists()


@pytest.mark.parametrize("step", [KEY, PACKED])
def test_the_header_comes_out_of_the_image(history: History, step: int) -> None:
    for manifest in read_checkpoint(history.paths, ALONE, step).manifests:
        check_header(history.root, manifest)


def _same(record: RedoRecord, rank: int) -> None:
    (expected,) = (one for one in recorded(record.segment.run, rank) if one.step == record.step)
    assert {tensor: bytes(content) for tensor, content in record.tensors()} == expected.tensors
    assert (record.content.groups, record.content.applied) == (expected.groups, expected.applied)
    assert record.rule == {"class": "AdamW", "torch": "2.9.0", "threads": 1}


def test_a_log_of_format_1_gives_what_was_recorded(history: History) -> None:
    assert recorded_steps(history.paths, ALONE) == [11, 12, 13]
    for (record,) in RedoChain(history.paths, CheckpointRef(ALONE, PACKED)).records(12, after=PACKED):
        _same(record, 0)
        assert (record.segment.writes.params, record.segment.writes.world_size) == ((("layer.w", "layer.b"), ()), 1)
    with pytest.raises(MismatchError, match=r"after step 13 is not what its update made: an edit: modify\(\)"):
        RedoChain(history.paths, CheckpointRef(ALONE, PACKED)).records(13, after=PACKED)


def test_each_step_that_can_not_be_made_again_says_why(history: History) -> None:
    base = CheckpointRef(ALONE, PACKED)
    with RebuiltSteps(history) as rebuilt:
        for step in (11, 12, 11):
            with pytest.raises(MismatchError, match=r"the version of torch was '2\.9\.0'"):
                rebuilt.make(RedoRef(CheckpointRef(ALONE, step), base))


def test_logs_of_format_2_give_what_each_rank_recorded(history: History) -> None:
    assert recorded_steps(history.paths, TOGETHER) == [1, 2]
    for records in RedoChain(history.paths, CheckpointRef(TOGETHER, 0)).records(2, after=0):
        assert len(records) == 2
        for rank, record in enumerate(records):
            _same(record, rank)
            assert record.segment.writes == FLATS


def test_a_log_of_format_3_says_which_steps_were_counted_twice(counted_back: History) -> None:
    assert verify(counted_back) == []
    assert recorded_steps(counted_back.paths, COUNTED_BACK) == [1, 2, 3, 4, 5, 6]
    for base, made, refused in ((0, [1], 2), (2, [], 3), (4, [5, 6], None)):
        chain = RedoChain(counted_back.paths, CheckpointRef(COUNTED_BACK, base))
        for step in made:
            (records,) = chain.records(step, after=step - 1)
            ((tensor, content),) = records[0].tensors()
            assert (tensor, bytes(content)) == (GRADIENT, gradient(step))
            since = {} if step < 3 else {"bias_correction_since": 3}
            assert records[0].content.groups == [{"lr": 0.5, **since}]
        if refused is not None:
            with pytest.raises(MismatchError, match=rf"after step {refused} .*: a load has counted the steps back"):
                chain.records(refused, after=refused - 1)


@pytest.mark.parametrize("written", FOLDERS)
def test_a_log_of_format_4_gives_the_gradients_that_were_indexed(written: str, tmp_path: Path) -> None:
    root = tmp_path / "history"
    if written == FOLDERS[0]:
        shutil.copytree(GOLDEN_INDEXED, root)
    else:
        golden_indexed.write(root)
    history = History.open(root)
    assert verify(history) == []
    chain = RedoChain(history.paths, CheckpointRef(golden_indexed.CLIPPED, 0))
    for step in golden_indexed.STEPS:
        (records,) = chain.records(step, after=step - 1)
        ((tensor, content),) = records[0].tensors()
        assert (tensor, bytes(content)) == (golden_indexed.GRADIENT, golden_indexed.gradient(step))
