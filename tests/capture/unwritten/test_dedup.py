"""Unchanged tensors are not written again, and a restore finds every bit, however wrong the prediction is."""

import dataclasses
import errno
from pathlib import Path

import pytest
import torch
from capture_helpers import assert_same, make, one_step, reference

import capture
import native
from capture.session.session import Session
from capture.unwritten.dedup import Deduplicator, Published
from catalog.errors import SnapshotError
from catalog.history import History
from catalog.verify import verify

WIDTH = 256
FROZEN_BYTES = WIDTH * WIDTH * 4 + WIDTH * 4
"""The frozen layer's matrix and its bias."""


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
        session.wait()
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


def test_a_frozen_tensor_is_written_once_and_then_referred_to(history):
    model, optimizer, session = frozen(history)
    expected = train(model, optimizer, session, 5)
    session.close()
    assert owners(history, session.run, "inner.weight") == dict.fromkeys(range(6), 0)
    assert owners(history, session.run, "inner.bias") == dict.fromkeys(range(6), 0)
    assert owners(history, session.run, "outer.weight") == {step: step for step in range(6)}
    assert session.stats.unchanged_bytes == 5 * FROZEN_BYTES
    assert_sound(history, session.run, expected)
    rows = History.open(history).query("SELECT step, bytes, new_bytes FROM checkpoints ORDER BY step").to_pylist()
    assert rows[1]["new_bytes"] == rows[2]["new_bytes"] == pytest.approx(rows[1]["bytes"] - FROZEN_BYTES, abs=16 << 10)


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
    assert owners(history, session.run, "inner.weight") == {0: 0, 1: 0, 2: 0, 3: 0, 4: 4, 5: 5, 6: 6, 7: 7}
    assert_sound(history, session.run, expected)


def test_a_write_that_a_sample_does_not_see_is_found_by_the_hash(history):
    """One bit before the second checkpoint, where nothing but a sample has said that the tensor is unchanged."""
    model, optimizer, session = frozen(history)
    session.wait()
    words = model.inner.weight.data.view(-1)

    def sample() -> bytes:
        where = {"addresses": _column(words.data_ptr()), "nbytes": _column(words.nbytes)}
        return native.sampled_digests(**where)

    before = sample()
    for place in range(1000, 3000):
        words[place] *= -1
        if sample() == before:
            break
        words[place] *= -1
    else:
        raise AssertionError("the sample sees every element: the test shows nothing")
    expected = train(model, optimizer, session, 3)
    session.close()
    assert owners(history, session.run, "inner.weight") == {0: 0, 1: 1, 2: 2, 3: 3}
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
    assert not deduplicator.expect_unchanged(plan)
    assert not deduplicator.stored
    committed.add(2)
    deduplicator.published(_part(3, plan))
    assert not deduplicator.stored, "one checkpoint alone says nothing"
    committed.add(3)
    deduplicator.published(_part(4, plan))
    assert {at.file for at in deduplicator.stored.values()} == {"file of 3"}
    assert "model/inner.weight" in deduplicator.stored


def test_a_sample_leads_to_no_checkpoint_that_is_not_committed(history):
    model, optimizer, session = frozen(history)
    train(model, optimizer, session, 1)
    session.close()
    plan = session._listing.plan(session._listing.read_objects())
    committed: set[int] = set()
    deduplicator = Deduplicator(lambda step: step in committed)
    samples = deduplicator.sample_new(plan)()
    assert "model/inner.weight" in samples
    deduplicator.published(dataclasses.replace(_part(0, plan), samples=samples))
    assert not deduplicator.expect_unchanged(plan)
    committed.add(0)
    deduplicator.published(_part(1, plan))
    assert deduplicator.expect_unchanged(plan)
    assert {at.file for at in deduplicator.stored.values()} == {"file of 0"}


def test_a_device_that_does_not_give_its_samples_costs_no_checkpoint(history, monkeypatch):
    def failing(self, plan):
        def samples():
            raise RuntimeError("an illegal memory access was encountered")

        return samples

    monkeypatch.setattr(Deduplicator, "sample_new", failing)
    model, optimizer, session = frozen(history)
    expected = train(model, optimizer, session, 4)
    session.close()
    assert session.failures == []
    assert_sound(history, session.run, expected)
    opened = History.open(history)
    assert opened.steps(session.run) == [0, *expected]
    told = opened.query("SELECT step, detail->>'reason' AS reason FROM events WHERE name = 'sampling_failed'")
    assert told.to_pylist()[0] == {"step": 0, "reason": "an illegal memory access was encountered"}
    # Two equal checksums say what no sample has said.
    assert owners(history, session.run, "inner.weight")[4] == 1


def test_what_is_known_is_not_learned_again_from_snapshots_that_were_planned_before(history):
    """Each checkpoint that is referred to stays whole, so there must be as few as can be."""
    model, optimizer, session = frozen(history)
    train(model, optimizer, session, 1)
    session.close()
    plan = session._listing.plan(session._listing.read_objects())
    pinned: list[int] = []
    deduplicator = Deduplicator(lambda step: True, pin=lambda step: not pinned.append(step))
    deduplicator.published(dataclasses.replace(_part(0, plan), samples=deduplicator.sample_new(plan)()))
    assert deduplicator.expect_unchanged(plan)
    for step in (1, 2, 3):
        deduplicator.published(_part(step, plan))
    assert {at.file for at in deduplicator.stored.values()} == {"file of 0"}
    assert pinned == [0]


def test_what_retention_has_removed_is_not_expected(history):
    model, optimizer, session = frozen(history)
    train(model, optimizer, session, 1)
    session.close()
    plan = session._listing.plan(session._listing.read_objects())
    deduplicator = Deduplicator(lambda step: True, pin=lambda step: False)
    deduplicator.published(dataclasses.replace(_part(0, plan), samples=deduplicator.sample_new(plan)()))
    deduplicator.published(_part(1, plan))
    assert not deduplicator.expect_unchanged(plan)
    assert not deduplicator.stored


def _part(step: int, plan) -> Published:
    return Published(step, f"file of {step}", plan.referable, bytes(16) * len(plan.parts), frozenset(), {})


def _column(value: int):
    return torch.tensor([value]).numpy().astype("uint64")
