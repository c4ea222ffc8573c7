"""Whoever reads a checkpoint keeps it from being removed as long as that takes, and no longer."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from explorer_helpers import Run, whole

from capture.load.state_dict import state_dict_of
from capture.restore import restore
from catalog.access.pins import is_pinned
from catalog.errors import NotFoundError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify
from dshistory.comparison.diff import diff
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

REF, OTHER = CheckpointRef("run-a", 0), CheckpointRef("run-a", 1)


class WatchedHistory(History):
    """A history that notes, whenever a checkpoint's extents are looked up, whether it is pinned then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[bool] = []

    def state_extents(self, ref: CheckpointRef, **chosen: Any) -> Any:
        self.seen.append(is_pinned(self.paths, ref))
        return super().state_extents(ref, **chosen)


@pytest.fixture
def history(tmp_path: Path) -> WatchedHistory:
    run = Run(tmp_path / "history")
    for step in range(2):
        run.checkpoint(step, whole({"weight": torch.full((4, 4), float(step)), "bias": torch.zeros(4)}))
    return WatchedHistory.open(tmp_path / "history")  # type: ignore[return-value]


@pytest.mark.guards("A removed checkpoint is removed whole")
def test_who_reads_has_a_pin(history: WatchedHistory) -> None:
    def compare() -> object:
        return diff(history, REF, OTHER, kinds="model", names="*", by="tensor", exact=False, quiet=True)

    readers: Sequence[tuple[Callable[[], object], int]] = ((lambda: state_dict_of(history, REF), 1), (compare, 2))
    for read, times in readers:
        history.seen.clear()
        read()
        assert history.seen == [True] * times
        assert not is_pinned(history.paths, REF)


def test_verify_pins_one_after_the_other(history: WatchedHistory) -> None:
    seen = []
    verify(
        history, progress=lambda nbytes: seen.append((is_pinned(history.paths, REF), is_pinned(history.paths, OTHER)))
    )
    assert set(seen) == {(True, False), (False, True)}


def test_tensors_are_pinned_as_long_as_their_checkpoint_is_open(history: WatchedHistory) -> None:
    checkpoint = CheckpointTensors(history, REF, advance=lambda nbytes: None)
    assert is_pinned(history.paths, REF)
    del checkpoint
    gc.collect()
    assert not is_pinned(history.paths, REF)


def test_a_restore_pins_until_it_has_finished(history: WatchedHistory) -> None:
    class Watched(torch.nn.Linear):
        pinned = False

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            Watched.pinned |= is_pinned(history.paths, REF)
            return super().named_parameters(*args, **kwargs)

    restore(0, history=history.root, model=Watched(4, 4))
    assert Watched.pinned
    assert not is_pinned(history.paths, REF)


def test_what_was_removed_is_said_to_be(history: WatchedHistory) -> None:
    folder = history.paths.step_dir("run-a", 0)
    folder.rename(folder.with_name(".000000000000.0123abcd.tmp"))
    for read in (
        lambda: state_dict_of(history, REF),
        lambda: CheckpointTensors(history, REF, advance=lambda nbytes: None),
        lambda: diff(history, REF, OTHER, kinds="model", names="*", by="tensor", exact=False, quiet=True),
    ):
        with pytest.raises(NotFoundError, match="run-a:0"):
            read()
    assert verify(history, [OTHER]) == []
