"""What a checkpoint is packed against is there, is packed by itself, and is an earlier one."""

import shutil
from pathlib import Path

import pytest
from catalog_helpers import flip_bit
from packed_helpers import RUN, all_bytes, make_history, packed_files_of, ref

from catalog.compaction.key_frames import KeyFrames
from catalog.compaction.pack import bases_in, drop_data_files, drop_images, pack_data_file
from catalog.errors import SetupError
from catalog.history import History
from catalog.paths import data_file, packed_file
from catalog.read.checkpoint import read_checkpoint
from catalog.verify import verify


@pytest.fixture
def history(tmp_path: Path) -> History:
    return make_history(tmp_path / "h", steps=range(0, 40, 10), elements=500)


def files(step: int) -> list[str]:
    return [data_file(RUN, step, rank) for rank in range(2)]


def begun(history: History) -> KeyFrames:
    return KeyFrames(history.paths, RUN, steps=history.steps(RUN), key_every=10)


def packed(history: History, frames: KeyFrames, step: int) -> int | None:
    _, base = frames.pack(step, alone=False, workers=1)
    drop_data_files(history.paths, ref(step), files(step))
    frames.passed(step)
    return base


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_a_data_file_stays_when_what_its_image_needs_was_removed_meanwhile(history: History) -> None:
    before = {key: data for key, data in all_bytes(history).items() if key[0] == 10}
    frames = begun(history)
    assert packed(history, frames, 0) is None
    assert frames.pack(10, alone=False, workers=1)[1] == 0
    shutil.rmtree(history.paths.step_dir(RUN, 0))
    shutil.rmtree(history.paths.step_dir(RUN, 20))
    with pytest.raises(SetupError, match=r"its image needs .* \(step 0\), which is gone: its data files stay"):
        drop_data_files(history.paths, ref(10), files(10))
    drop_images(history.paths, ref(10), files(10))
    assert packed_files_of(history) == []
    assert packed(history, frames, 10) is None
    assert packed(history, frames, 30) == 10
    assert {key: data for key, data in all_bytes(history).items() if key[0] == 10} == before
    assert verify(history) == []


@pytest.mark.guards("A packed checkpoint is the checkpoint")
def test_a_data_file_stays_when_its_image_needs_one_that_needs_another(history: History) -> None:
    before = all_bytes(history)
    bases = read_checkpoint(history.paths, RUN, 10).manifests
    for part in read_checkpoint(history.paths, RUN, 20).manifests:
        against = bases_in(bases[part.rank], files=frozenset(files(10)))
        pack_data_file(history.paths, part, bases=against, alone=True, workers=1)
    frames = begun(history)
    assert [packed(history, frames, step) for step in (0, 10)] == [None, 0]
    with pytest.raises(SetupError, match="no reader follows two links: its data files stay"):
        drop_data_files(history.paths, ref(20), files(20))
    assert all((history.root / file).exists() for file in files(20))
    assert all_bytes(history) == before


def test_nothing_more_is_packed_against_a_key_frame_that_is_found_damaged(history: History) -> None:
    frames = begun(history)
    assert packed(history, frames, 0) is None
    flip_bit(history.root / packed_file(files(0)[0]), offset=40)
    assert packed(history, frames, 10) is None
    assert list(frames.damaged) == [0]
    assert packed(history, frames, 20) == 10


def test_a_checkpoint_never_needs_a_later_one(history: History) -> None:
    frames = begun(history)
    assert packed(history, frames, 20) is None
    assert packed(history, frames, 10) is None
    assert packed(history, frames, 30) == 10


def test_an_image_that_others_may_have_made_is_never_replaced_nor_removed_alone(history: History) -> None:
    frames = begun(history)
    frames.pack(0, alone=False, workers=1)
    image = history.root / packed_file(files(0)[1])
    flip_bit(image, offset=40)
    content = image.read_bytes()
    with pytest.raises(SetupError, match="is there already, and needs other files, or is damaged"):
        frames.pack(0, alone=False, workers=1)
    assert image.read_bytes() == content
    assert list(history.root.rglob("*.tmp")) == []
    (history.root / files(0)[0]).unlink()
    drop_images(history.paths, ref(0), files(0))
    assert packed_files_of(history) == [history.root / packed_file(files(0)[0])]
    assert verify(history) == []
