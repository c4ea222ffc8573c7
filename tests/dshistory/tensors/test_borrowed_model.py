"""A model that is borrowed while it trains: the step that is still being read keeps its bits, and so does the model."""

from pathlib import Path

import torch
from capture_helpers import MIB, assert_same, faulty_session, make, one_step, reference

import capture
import native
from dshistory.tensors.borrowed_model import BorrowedModel


def test_a_step_that_is_still_read_from_the_live_model_keeps_its_bits(tmp_path: Path) -> None:
    model, optimizer = make(1500)
    slow = native.Faults(delay_us=100_000)
    session = faulty_session(model, optimizer, tmp_path / "history", faults=slow, budget_bytes=10 * MIB)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    zeros = [{name: torch.zeros_like(one) for name, one in named} for named in
             (model.named_parameters(), model.named_buffers())]  # fmt: skip
    with BorrowedModel(model, verb="test") as borrowed:
        borrowed.load(*zeros, where="zeros")
        assert not any(parameter.any() for parameter in model.parameters())
    assert_same(reference(model, optimizer), expected)
    session.close()
    assert not session.failures
    assert_same(capture.restore(f"{session.run}:1", history=tmp_path / "history"), expected)
