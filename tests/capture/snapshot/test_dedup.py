"""Unchanged tensors are not written again, and a restore finds every bit, however wrong the prediction is."""

import errno
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
import native
from capture.session.session import Session
from capture.snapshot.dedup import Deduplicator, Published
from catalog.errors import SnapshotError
from catalog.history import History
from catalog.verify import verify

WIDTH = 256
FROZEN_BYTES = WIDTH * WIDTH * 4
"""This counts the frozen matrix alone: the vectors are too small to be deduplicated."""


def frozen(root: Path, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer, Session]:
    """Return a captured model with a frozen first layer, its optimizer, and a session that captures every step."""
    model, _ = make(WIDTH)
    model.inner.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, optimizer, capture.enable(model, optimizer=optimizer, history=root, every=1, **options)


def train(model, optimizer, session, steps: int) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """Train and return the reference states by step.

    Every checkpoint is committed before the next step, so that every run deduplicates the same tensors.
    """
    expected = {}
    for _ in range(steps):
        one_step(model, optimizer)
        session.wait()
        expected[session.snapshot()] = reference(model, optimizer)
    return expected


def owners(root: Path, run: str, name: str) -> dict[int, int]:
    """Return, for each step, the step whose file holds the tensor's bytes."""
    rows = History.open(root).query(
        "SELECT step, file FROM fragments WHERE run = $run AND name = $name AND kind = 'model'",
        {"run": run, "name": name},
    )
    return {row["step"]: int(row["file"].split("/steps/")[1].split("/")[0]) for row in rows.to_pylist()}


def assert_sound(root: Path, run: str, expected: dict) -> None:
    assert verify(History.open(root)) == []
    for step, state in expected.items():
        assert_same(capture.restore(f"{run}:{step}", history=root), state)


def test_a_frozen_tensor_is_written_twice_and_then_referred_to(history):
    model, optimizer, session = frozen(history)
    expected = train(model, optimizer, session, 5)
    session.close()
    assert owners(history, session.run, "inner.weight") == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert owners(history, session.run, "outer.weight") == {step: step for step in range(6)}
    assert session.stats.unchanged_bytes == 4 * FROZEN_BYTES
    assert_sound(history, session.run, expected)
    rows = History.open(history).query("SELECT step, bytes, new_bytes FROM checkpoints ORDER BY step").to_pylist()
    assert rows[1]["new_bytes"] - rows[2]["new_bytes"] == FROZEN_BYTES
    assert rows[1]["bytes"] == pytest.approx(rows[2]["bytes"], abs=1000)


def test_a_write_that_torch_does_not_count_is_found_and_the_tensor_no_longer_predicted_unchanged(history):
    model, optimizer, session = frozen(history)
    expected = train(model, optimizer, session, 3)
    before = model.inner.weight._version
    for _ in range(3):
        with session.modify():
            model.inner.weight.data.view(-1)[7:9] += 1.0
        expected |= train(model, optimizer, session, 1)
    expected |= train(model, optimizer, session, 1)
    session.close()
    assert model.inner.weight._version == before, "torch has counted it: the test shows nothing"
    assert owners(history, session.run, "inner.weight") == {0: 0, 1: 1, 2: 1, 3: 1, 4: 4, 5: 5, 6: 6, 7: 7}
    assert_sound(history, session.run, expected)


@pytest.mark.filterwarnings("ignore:the snapshot")
@pytest.mark.parametrize("edit", ["counted", "freed"])
def test_an_edit_while_an_unchanged_tensor_is_checked_fails_the_snapshot_by_name(history, edit):
    model, optimizer, session = frozen(history)
    train(model, optimizer, session, 3)
    one_step(model, optimizer)
    kept = model.inner.weight.detach().clone()
    if edit == "counted":
        with torch.no_grad():
            model.inner.weight.mul_(2)
    else:
        model.inner.weight.untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match=r"inner\.weight"):
        session.wait()
    if edit == "freed":
        model.inner.weight.untyped_storage().resize_(kept.nbytes)
        model.inner.weight.data.copy_(kept)
    expected = train(model, optimizer, session, 2)
    session.close()
    assert_sound(history, session.run, expected)


def test_hashing_unmapped_memory_is_an_error():
    page = torch.arange(3 << 20, dtype=torch.uint8)
    good = {"addresses": _column(page.data_ptr()), "nbytes": _column(page.nbytes)}
    assert native.checksum_memory(**good) == native.checksum(page.numpy())
    # The first page of an address space is never mapped.
    with pytest.raises(OSError, match="no longer mapped") as refused:
        native.checksum_memory(addresses=_column(4096), nbytes=_column(4096))
    assert refused.value.errno == errno.EFAULT


def test_only_committed_checkpoints_are_referred_to(history):
    """The deduplicator learns nothing from a part whose checkpoint is never committed because another rank failed."""
    model, optimizer, session = frozen(history)
    train(model, optimizer, session, 1)
    session.close()
    plan = session._listing.plan(session._listing.read_objects())
    committed: set[int] = set()
    deduplicator = Deduplicator(lambda step: step in committed)
    for step in range(3):
        deduplicator.published(_part(step, plan))
    assert not deduplicator.expected.stored
    committed.add(2)
    deduplicator.published(_part(3, plan))
    assert not deduplicator.expected.stored, "one checkpoint alone says nothing"
    committed.add(3)
    deduplicator.published(_part(4, plan))
    assert {at.file for at in deduplicator.expected.stored.values()} == {"file of 3"}
    assert "model/inner.weight" in deduplicator.expected.stored


def _part(step: int, plan) -> Published:
    return Published(step, f"file of {step}", plan.referable, bytes(16) * len(plan.parts), frozenset(), {})


def _column(value: int):
    return torch.tensor([value]).numpy().astype("uint64")
