"""A rank removes its part of a step when no other rank will publish the missing one, and not before."""

import pytest
from catalog_helpers import Run, pieces_of

from capture.publishing import uncommitted_parts
from capture.publishing.uncommitted_parts import UncommittedParts


def published(run, parts, step):
    run.part(step, 0, pieces_of({"weight": bytes([step])}))
    parts.published(step)


@pytest.mark.parametrize(("first", "second"), [(4, 5), (5, 4)])
def test_a_part_goes_when_a_step_that_came_later_is_committed(tmp_path, first, second):
    """Whatever their numbers: a load may have counted the steps back."""
    with Run(tmp_path, world_size=2) as run:
        writer = run.writers[0]
        parts = UncommittedParts(writer)
        published(run, parts, first)
        assert writer.paths.manifest("run-a", first, 0).exists()
        run.part(second, 0, pieces_of({"weight": b"2"}))
        run.part(second, 1, pieces_of({"weight": b"2"}))
        assert writer.try_commit(second)
        parts.published(second)
        assert not writer.paths.step_dir("run-a", first).exists()


def test_a_part_that_came_after_a_committed_step_with_a_greater_number_stays(tmp_path):
    """A slower rank may still be writing its part of it."""
    with Run(tmp_path, world_size=2) as run:
        writer = run.writers[0]
        parts = UncommittedParts(writer)
        published(run, parts, 5)
        run.part(5, 1, pieces_of({"weight": b"5"}))
        assert run.writers[1].try_commit(5)
        published(run, parts, 4)
        run.part(4, 1, pieces_of({"weight": b"4"}))
        assert run.writers[1].try_commit(4)


def test_a_part_goes_at_the_end_when_a_rank_has_failed_its_step_also_while_that_rank_merges_its_journal(
    tmp_path, monkeypatch
):
    with Run(tmp_path, world_size=2) as run:
        writer, failing = run.writers
        parts = UncommittedParts(writer)
        published(run, parts, 4)
        for step in (3, 4):
            failing.journal.event("failed", step, reason="no room")
            failing.journal.flush()
        read = uncommitted_parts.read_segment

        def read_segment(path, *, run):
            failing.journal.close()
            return read(path, run=run)

        monkeypatch.setattr(uncommitted_parts, "read_segment", read_segment)
        parts.closing()
        assert not writer.paths.step_dir("run-a", 4).exists()
