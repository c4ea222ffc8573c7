"""A redo log outlives the checkpoints between which it lies, as long as there is one from which its steps are made."""

from pathlib import Path

import pytest
import torch

import capture
from capture.redo_log import redo_log
from catalog.access.pins import pinned
from catalog.errors import NotFoundError
from catalog.records import CheckpointRef
from catalog.retention.facts import bytes_on_disk
from catalog.retention.redo_segments import remove_segments, segment_facts
from catalog.retention.removal import retention_journal
from dshistory.explorer import Explorer


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Explorer, dict[int, torch.Tensor]]:
    """Return a history with the checkpoints 0, 4, 8 and 12 and a segment for each step, and the weights of each."""
    monkeypatch.setattr(redo_log, "_SEGMENT_S", 0.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 12)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = {}
    options = {"every": 4, "history": tmp_path / "history", "redo": True, "stats_every": 0}
    with capture.enable(model, optimizer=optimizer, **options):
        for step in range(1, 13):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights[step] = model.weight.detach().clone()
    return Explorer.open(tmp_path / "history"), weights


def _segments(h: Explorer) -> list[int]:
    folder = h.history.paths.redo_dir(h.history.current_run())
    return sorted(int(path.stem[-12:]) for path in folder.iterdir())


@pytest.mark.guards("A redo step has the bits of the training")
def test_steps_are_made_from_an_earlier_checkpoint_when_theirs_is_removed(trained) -> None:
    h, weights = trained
    assert _segments(h) == list(range(1, 13))
    h.prune("last 1, every 12", dry_run=False)
    assert h.log()["step"].to_pylist() == [0, 12]
    assert _segments(h) == list(range(1, 13))
    for step in (3, 4, 7, 11):
        assert torch.equal(h.tensor("weight", step), weights[step])


def test_what_can_not_be_made_again_any_more_goes_with_the_checkpoints(trained) -> None:
    h, weights = trained
    before = h.usage().tables["runs"][0]
    h.prune("last 2", dry_run=False)
    assert h.log()["step"].to_pylist() == [8, 12]
    assert _segments(h) == [9, 10, 11, 12]
    assert torch.equal(h.tensor("weight", 10), weights[10])
    with pytest.raises(NotFoundError, match="step 7"):
        h.tensor("weight", 7)
    after = h.usage().tables["runs"][0]
    assert 0 < after["redo"] < before["redo"]
    assert list(h.verify()) == []


@pytest.mark.guards("A byte budget holds")
def test_a_budget_takes_the_oldest_steps_first_and_leaves_what_a_reader_reads(trained) -> None:
    h, weights = trained
    run, paths = h.history.current_run(), h.history.paths
    log = [one.nbytes for one in segment_facts(paths, run)]
    budget = bytes_on_disk(paths.run_dir(run)) + sum(log) - bytes_on_disk(paths.redo_dir(run)) - log[0] - log[-1]
    keep = f"last 9, {budget}B"
    told = h.prune(keep)
    assert "of redo logs would be removed, their oldest steps" in told.note
    assert _segments(h) == list(range(1, 13))
    with pinned(paths, CheckpointRef(run, 0)):
        h.prune(keep, dry_run=False)
        assert _segments(h) == [1, 2, 3, 4, 9, 10, 11, 12]
    done = h.prune(keep, dry_run=False)
    assert len(done) == 0
    assert h.log()["step"].to_pylist() == [0, 4, 8, 12]
    assert torch.equal(h.tensor("weight", 10), weights[10])
    with pytest.raises(NotFoundError, match="step 7"):
        h.tensor("weight", 7)
    reasons = h.sql("SELECT detail->>'reason' AS reason FROM events WHERE name = 'redo_removed'")["reason"].to_pylist()
    assert f"steps 5 to 8: beyond the budget of {budget} bytes" in reasons
    assert list(h.verify()) == []


@pytest.mark.guards("A byte budget holds")
def test_segments_stay_while_somebody_reads_a_checkpoint_from_which_they_are_made(trained) -> None:
    h, _ = trained
    run, paths = h.history.current_run(), h.history.paths
    journal = retention_journal(paths, run)
    with pinned(paths, CheckpointRef(run, 4)):
        assert remove_segments(paths, segment_facts(paths, run), "a test", journal=journal) > 0
    assert _segments(h) == [5, 6, 7, 8]
    left = segment_facts(paths, run)
    assert remove_segments(paths, left, "a test", journal=journal) == sum(one.nbytes for one in left)
    assert remove_segments(paths, left, "a test", journal=journal) == 0, "what is gone counts once"
    assert _segments(h) == []
