"""What a power cut may leave is a history that opens, verifies and goes on; and a missing fsync would be seen.

`make prove-crashes` opens every state of three trainings; here is a sample.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath

import pytest
from crash_checks import Checker, Recording, record, states
from crash_states import Disk, Tree
from file_calls import Call, Op

SAMPLE = 24


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(ranks=1, steps=1)


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.slow
def test_a_sample_of_the_states_after_a_power_cut(recording: Recording, figure: Callable[[str, float], None]) -> None:
    every = list(states(recording))
    assert len(every) > 1000
    with Checker(recording) as checker:
        for number, state in enumerate(every[:: len(every) // SAMPLE]):
            assert not checker.check(state, next_training=number == SAMPLE - 2), (state.calls, state.tree.keys())
        assert checker.counts["trainings resumed"] == 1
        assert checker.counts["verified"] > 3
        figure("states opened", checker.counts["states"])
    figure("states that there are", len(every))


@pytest.mark.guards("A checkpoint exists whole or not at all")
@pytest.mark.slow
@pytest.mark.parametrize(
    "forgotten",
    [
        "*.safetensors.*.tmp",
        "*.manifest.parquet.*.tmp",
        ".commit.json.*.tmp",
        ".run.json.*.tmp",
        "00000000000?",
        "runs",
    ],
)
def test_each_sync_that_is_left_out_is_missed(recording: Recording, forgotten: str) -> None:
    """The calls are those of the training, but for the fsync of one kind of file or folder."""
    calls = [call for call in recording.calls if call.op != Op.SYNC or not PurePosixPath(call.path).match(forgotten)]
    assert len(calls) < len(recording.calls)
    without = replace(recording, calls=calls)
    last = next(index for index, call in enumerate(calls) if call.op == Op.NOTE)
    with Checker(without) as checker:
        late = (state for state in states(without) if state.calls >= last)
        assert any(checker.check(state) for state in late)


def test_what_is_synced_stays() -> None:
    assert _left_by(_published(sync_file=True, sync_folder=True)) == [{"a": b"12"}]


def test_without_fsync_of_the_file_its_name_may_outlive_its_bytes() -> None:
    left = _left_by(_published(sync_file=False, sync_folder=True))
    assert {tree["a"] for tree in left} == {b"12", b"", b"1\0", b"\0\0"}


def test_without_fsync_of_the_folder_the_name_may_be_lost() -> None:
    left = _left_by(_published(sync_file=True, sync_folder=False))
    assert {frozenset(tree) for tree in left} == {frozenset(), frozenset({"a"}), frozenset({"tmp"})}


def test_later_writes_may_outlive_earlier_ones() -> None:
    writes = [_call(Op.WRITE, data=b"12"), _call(Op.WRITE, at=2, data=b"34")]
    left = _left_by([_call(Op.CREATE, "/r/a"), _call(Op.SYNC, "/r", inode=0), *writes])
    assert {tree["a"] for tree in left} == {b"", b"12\0\0", b"12", b"1234", b"\0\0\0\0", b"\0\x0034"}


def _published(*, sync_file: bool, sync_folder: bool) -> list[Call]:
    return [
        _call(Op.CREATE, "/r/tmp"),
        _call(Op.WRITE, data=b"12"),
        *[_call(Op.SYNC)] * sync_file,
        _call(Op.RENAME, "/r/tmp", other="/r/a"),
        *[_call(Op.SYNC, "/r", inode=0)] * sync_folder,
    ]


def _call(op: Op, path: str = "", *, inode: int = 7, other: str = "", at: int = 0, data: bytes = b"") -> Call:
    return Call(op, 1, inode, at, path, other, data)


def _left_by(calls: list[Call]) -> list[Tree]:
    """Return what a power cut after the last call may leave."""
    disk = Disk("/r")
    for call in calls:
        disk.apply(call)
    trees = [tree for _, tree in disk.pending_states()]
    return [tree for index, tree in enumerate(trees) if tree not in trees[:index]]
