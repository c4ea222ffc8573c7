"""Frozen tensors of a device are written once and then referred to; the device itself compares them."""

from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, make, one_step, reference
from late_device import LateDevice, late_until_the_barrier, session_on, small_writer

import capture
from capture.devices.digests import DeviceDigests, sample_of, words_of
from capture.session.session import Session
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

WIDTH = 160
"""The frozen matrix has 102,400 bytes: more than the least that is referred to, and one and a half digested rows."""


def samples(tensor: torch.Tensor) -> list[bytes]:
    words = words_of(tensor)
    assert words is not None
    return DeviceDigests([sample_of(words)]).read().digests()


class Training:
    """A training on a simulated device whose first layer is frozen; every checkpoint is committed before the next."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, zeros: bool = False) -> None:
        self.root = root
        self.model, _ = make(WIDTH)
        if zeros:
            self.model.zeros = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        self.model.inner.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.device = LateDevice()
        self.device.ending = True
        late_until_the_barrier(self.device, monkeypatch)
        self.device.gate.set()
        self.session: Session = session_on(
            self.device, self.model, self.optimizer, root, writer=small_writer(budget_bytes=4 * MIB)
        )
        self.expected = {0: reference(self.model, self.optimizer)}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.session.wait()
            one_step(self.model, self.optimizer)
            self.session.wait()
            self.expected[self.session.snapshot()] = reference(self.model, self.optimizer)

    def owners(self, name: str = "inner.weight") -> dict[int, int]:
        """Return, for each step, the step whose file holds the frozen matrix."""
        rows = History.open(self.root).query(
            "SELECT step, file FROM fragments WHERE name = $name AND kind = 'model'", {"name": name}
        )
        return {row["step"]: int(row["file"].split("/steps/")[1].split("/")[0]) for row in rows.to_pylist()}

    def assert_sound(self) -> None:
        self.session.close()
        assert verify(History.open(self.root)) == []
        for step, state in self.expected.items():
            assert_same(capture.restore(f"{self.session.run}:{step}", history=self.root), state)


def test_a_frozen_tensor_is_written_once_and_then_referred_to(history, monkeypatch):
    training = Training(history, monkeypatch)
    training.steps(5)
    training.assert_sound()
    assert training.owners() == dict.fromkeys(range(6), 0)
    assert training.session.stats.unchanged_bytes == 5 * 4 * (WIDTH * WIDTH + WIDTH)


def test_a_frozen_tensor_in_channels_last_order_is_referred_to_too(history, monkeypatch):
    training = Training(history, monkeypatch)
    training.model.inner.weight.data = torch.randn(WIDTH, WIDTH).t()
    training.steps(6)
    training.assert_sound()
    owners = training.owners()
    assert (owners[5], owners[6]) == (owners[4], owners[4])


def test_zeros_of_another_dtype_are_written(history, monkeypatch):
    """Their digest is zero, however many they are, and the name of a part says nothing of its dtype."""
    training = Training(history, monkeypatch, zeros=True)
    training.steps(3)
    with training.session.modify():
        training.model.zeros.data = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    training.steps(2)
    training.assert_sound()
    owners = training.owners("zeros")
    assert owners[3] == 0
    assert min(owners[4], owners[5]) >= 4


@pytest.mark.parametrize("place", [0, 65_535, 65_536, WIDTH * WIDTH // 2 - 1], ids=str)
def test_a_write_that_torch_does_not_count_is_found_wherever_it_is(history, monkeypatch, place):
    """One sign in a declared edit: no sample would see it, and the whole digest does."""
    training = Training(history, monkeypatch)
    training.steps(4)
    before = training.model.inner.weight._version
    with training.session.modify():
        training.model.inner.weight.data.view(-1)[place % (WIDTH * WIDTH)].neg_()
    training.steps(2)
    assert training.model.inner.weight._version == before, "torch has counted it: the test shows nothing"
    training.assert_sound()
    assert training.owners() == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 5, 6: 6}


def test_an_edit_that_the_sample_does_not_see_is_found_when_the_stored_bytes_are_read_back(history, monkeypatch):
    """Before the second checkpoint nothing but the sample says that a tensor is unchanged: all its bytes decide."""
    training = Training(history, monkeypatch)
    training.session.wait()
    before = samples(training.model.inner.weight)
    training.model.inner.weight.data.view(-1)[777].neg_()
    assert samples(training.model.inner.weight) == before, "the sample sees it: the test shows nothing"
    training.steps(3)
    training.assert_sound()
    assert training.owners() == {0: 0, 1: 1, 2: 2, 3: 3}


def test_stored_bytes_that_are_damaged_are_not_referred_to(history, monkeypatch):
    training = Training(history, monkeypatch)
    training.session.wait()
    (extent,) = (
        one
        for one in History.open(history).extents(CheckpointRef(training.session.run, 0))
        if (one.kind, one.name) == ("model", "inner.weight")
    )
    file = history / extent.file
    whole = file.read_bytes()
    at = extent.offset + 5000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    training.steps(2)
    training.session.close()
    assert training.owners() == {0: 0, 1: 1, 2: 2}
    for step in (1, 2):
        assert_same(capture.restore(f"{training.session.run}:{step}", history=history), training.expected[step])


def test_an_edit_between_digest_and_copy_leaves_no_wrong_reference(history, monkeypatch):
    """The digest is of what the step has left. What was copied after the edit is not that, so nothing is learned."""
    training = Training(history, monkeypatch)
    training.steps(1)
    training.device.ending = False
    training.device.gate.clear()
    one_step(training.model, training.optimizer)
    training.model.inner.weight.data.view(-1)[777].neg_()
    training.device.ending = True
    training.device.gate.set()
    training.session.wait()
    # The sample does not see one element of 25,600: the promise says so, and the checkpoint has the edited value.
    training.expected[training.session.snapshot()] = reference(training.model, training.optimizer)
    training.model.inner.weight.data.view(-1)[777].neg_()
    training.steps(3)
    training.assert_sound()


@pytest.mark.guards("A checkpoint holds one step")
def test_a_frozen_tensor_that_is_given_other_memory_after_the_step_is_the_one_of_the_step(history, monkeypatch):
    """`p.data = x` before the device has compared: the step's memory has not changed, and no other is its state."""
    training = Training(history, monkeypatch)
    training.steps(3)
    training.session.wait()
    training.device.ending = False
    training.device.gate.clear()
    one_step(training.model, training.optimizer)
    training.expected[training.session.snapshot()] = reference(training.model, training.optimizer)
    weight = training.model.inner.weight
    own = weight.data
    weight.data = torch.zeros_like(own)
    training.device.ending = True
    training.device.gate.set()
    training.session.wait()
    weight.data = own
    training.steps(1)
    training.assert_sound()
    assert training.owners() == dict.fromkeys(range(6), 0)
