"""A redo log outlives the checkpoints between which it lies, as long as there is one from which its steps are made."""

from pathlib import Path

import pytest
import torch

import capture
from capture.session import redo_log
from catalog.errors import NotFoundError
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
