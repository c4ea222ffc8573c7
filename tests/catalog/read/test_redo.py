"""A step of a redo log is there when the logs of all ranks have it, and say the same of it."""

import pytest

from catalog.errors import MismatchError, NotFoundError
from catalog.format.redo_segment import RedoWrites
from catalog.format.redo_writer import RedoFileWriter
from catalog.paths import HistoryPaths
from catalog.read.redo import RedoChain, recorded_steps
from catalog.records import CheckpointRef

BASE = CheckpointRef("run-a", 2)


def write(paths, rank, steps, *, skipped=(), broken=(), world_size=2):
    writer = RedoFileWriter(paths, "run-a", rank, {"class": "SGD"}, RedoWrites((("a",),), world_size=world_size))
    for step in steps:
        writer.end_step(step, groups=[{}], broken="an edit" if step in broken else None, applied=step not in skipped)
    writer.publish()


@pytest.fixture
def paths(tmp_path):
    found = HistoryPaths(tmp_path)
    found.run_dir("run-a").mkdir(parents=True)
    return found


def test_each_step_has_the_records_of_all_ranks_in_order(paths):
    write(paths, 1, (3, 4))
    write(paths, 0, (3,))
    write(paths, 0, (4, 5))
    chain = RedoChain(paths, BASE).records(4, after=2)
    assert [[(one.segment.rank, one.step) for one in records] for records in chain] == [
        [(0, 3), (1, 3)],
        [(0, 4), (1, 4)],
    ]
    assert recorded_steps(paths, "run-a") == [3, 4]
    with pytest.raises(NotFoundError, match="the redo log of rank 1 has no record of step 5"):
        RedoChain(paths, BASE).records(5, after=2)


def test_a_rank_that_something_else_has_written_is_named(paths):
    write(paths, 0, (3,))
    write(paths, 1, (3,), broken=(3,))
    with pytest.raises(MismatchError, match="after step 3 is not what its update made on rank 1: an edit"):
        RedoChain(paths, BASE).records(3, after=2)


def test_ranks_agree_whether_an_update_was_made(paths):
    write(paths, 0, (3, 4), skipped=(3, 4))
    write(paths, 1, (3, 4), skipped=(3,))
    assert len(RedoChain(paths, BASE).records(3, after=2)) == 1
    with pytest.raises(MismatchError, match="the ranks do not agree whether the update of step 4 was made"):
        RedoChain(paths, BASE).records(4, after=2)


def test_ranks_of_several_worlds_do_not_belong_together(paths):
    write(paths, 0, (3,))
    write(paths, 1, (3,), world_size=3)
    with pytest.raises(NotFoundError, match="the redo log of rank 2 has no record of step 3"):
        RedoChain(paths, BASE).records(3, after=2)


def test_of_a_step_that_was_counted_twice_no_earlier_record_counts(paths):
    """In whatever order the segments come."""
    write(paths, 0, (3, 4, 5), world_size=1)
    for steps in ((3, 4), (4, 5)):
        writer = RedoFileWriter(paths, "run-a", 0, {"class": "SGD"}, RedoWrites((("a",),)))
        for step in steps:
            writer.end_step(step, groups=[], broken="a load", counted_twice=True)
        writer.publish()
    for step in (3, 4, 5):
        with pytest.raises(MismatchError, match="after step 3 is not what its update made: a load"):
            RedoChain(paths, BASE).records(step, after=2)
    assert recorded_steps(paths, "run-a") == [3, 4, 5]
