"""Segments that have steps in common are removed as one, and a removal that ends anywhere leaves no wrong record."""

import os
from pathlib import Path

import pytest

from catalog.format.journal import Journal
from catalog.format.redo_segment import RedoSegmentName, redo_segments
from catalog.paths import HistoryPaths
from catalog.retention import redo_segments as removal
from catalog.retention.redo_segments import remove_segments, remove_useless_segments, segment_facts, together

RUN = "run-a"


@pytest.fixture
def paths(tmp_path: Path) -> HistoryPaths:
    """Return a run with checkpoints 4 and 6, steps 5 to 9, and the note of a load that has counted back to 6."""
    found = HistoryPaths(tmp_path)
    for step in (4, 6):
        folder = found.step_dir(RUN, step)
        folder.mkdir(parents=True)
        found.marker(RUN, step).touch()
    found.redo_dir(RUN).mkdir(parents=True)
    found.journal_dir(RUN).mkdir()
    for order, (first, last) in enumerate([(5, 9), (6, 7), (10, 12)]):
        path = found.redo_dir(RUN) / RedoSegmentName(0, first, last).name
        path.write_bytes(b"segment")
        os.utime(path, ns=(order, order))
    return found


def there(paths: HistoryPaths) -> list[int]:
    return sorted(name.first for name in redo_segments(paths, RUN))


def test_what_has_steps_in_common_is_one_group(paths: HistoryPaths) -> None:
    assert [[one.name.first for one in group] for group in together(segment_facts(paths, RUN))] == [[5, 6], [10]]


def test_a_note_alone_is_not_removed(paths: HistoryPaths) -> None:
    note = [one for one in segment_facts(paths, RUN) if one.name.first == 6]
    journal = Journal(paths.journal_dir(RUN), run=RUN, writer="test", rank=0)
    assert remove_segments(paths, note, "for room", journal=journal) == 0
    assert there(paths) == [5, 6, 10]
    both = [one for one in segment_facts(paths, RUN) if one.name.first < 10]
    assert remove_segments(paths, both, "for room", journal=journal) > 0
    assert there(paths) == [10]


def test_a_note_stays_while_what_it_overrides_can_be_made(paths: HistoryPaths) -> None:
    paths.marker(RUN, 4).unlink()
    paths.step_dir(RUN, 4).rmdir()
    paths.marker(RUN, 6).unlink()
    paths.step_dir(RUN, 6).rmdir()
    folder = paths.step_dir(RUN, 8)  # the note's own checkpoint is not committed yet
    folder.mkdir()
    paths.marker(RUN, 8).touch()
    remove_useless_segments(paths, RUN)
    assert there(paths) == [5, 6, 10]


def test_a_removal_that_is_cut_off_leaves_the_note(paths: HistoryPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_removed(folder: int, is_known: object, *, only_temporaries: bool) -> list[str]:
        monkeypatch.setattr(removal, "remove_files", cut_off)
        return whole(folder, is_known, only_temporaries=only_temporaries)

    def cut_off(*_: object, **__: object) -> list[str]:
        raise OSError("the process is killed here")

    whole = removal.remove_files
    monkeypatch.setattr(removal, "remove_files", one_removed)
    both = [one for one in segment_facts(paths, RUN) if one.name.first < 10]
    journal = Journal(paths.journal_dir(RUN), run=RUN, writer="test", rank=0)
    remove_segments(paths, both, "for room", journal=journal)
    assert there(paths) == [6, 10]
