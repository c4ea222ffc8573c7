"""Low-precision weights of a device that are their masters, rounded, are not stored either: the device compares both
where it has both, the host where the optimizer was offloaded to it."""

from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, reference
from late_device import LateDevice, late_until_the_barrier, session_on, small_writer
from mixed_precision import MixedAdam, OtherRounding, codecs, known, mixed, update_mixed

import capture
import native
from capture.devices import rounded_weights
from capture.devices.rounded_weights import are_rounded, rounds_as_defined, samples_are_rounded
from capture.session.session import Session
from capture.unwritten.derived_check import DerivedCheck
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

WIDTH = 512
"""So many weights of a matrix are more than one sample, and less than one chunk."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}

WHERE = {
    "all on the device": lambda tensor: True,
    "the optimizer offloaded": lambda tensor: tensor.dtype != torch.float32,
}


class Training:
    """A training in low precision on a simulated device, which copies and computes only while the barrier waits."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        where: str = "all on the device",
        dtype: str = "BF16",
        optimizer: type[MixedAdam] = MixedAdam,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.root = root
        self.model, _ = mixed(WIDTH, DTYPES[dtype])
        self.optimizer = optimizer(self.model.parameters())
        self.device = LateDevice(WHERE[where])
        late_until_the_barrier(self.device, monkeypatch)
        self.session: Session = session_on(
            self.device, self.model, self.optimizer, root, writer=small_writer(budget_bytes=4 * MIB)
        )
        self.expected = {}

    def steps(self, count: int) -> None:
        for _ in range(count):
            update_mixed(self.model, self.optimizer)
            self.expected[self.session.snapshot()] = known(reference(self.model, self.optimizer))

    def copy_at_once(self) -> None:
        """Let the device copy without the barrier: an edit, too, waits for what it is about to drop."""
        self.device.ending = True
        self.device.gate.set()

    def assert_sound(self) -> None:
        self.copy_at_once()
        self.session.close()
        assert not self.session.failures
        assert verify(History.open(self.root)) == []
        for step, state in self.expected.items():
            assert_same(capture.restore(f"{self.session.run}:{step}", history=self.root), state)

    def how(self) -> dict[int, set[str]]:
        """Return how the weights of every step are stored."""
        found: dict[int, set[str]] = {}
        for (step, kind, _), codec in codecs(self.root).items():
            if kind == "model":
                found.setdefault(step, set()).add(codec)
        return found


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", WHERE)
def test_weights_of_a_device_are_not_stored_and_every_step_is_restored_bit_for_bit(history, monkeypatch, where, dtype):
    training = Training(history, monkeypatch, where=where, dtype=dtype)
    training.steps(4)
    training.assert_sound()
    assert training.how() == {step: {"rounded"} for step in range(5)}


@pytest.mark.parametrize("where", WHERE)
def test_twelve_bytes_a_parameter_of_a_device_are_written(history, monkeypatch, where):
    training = Training(history, monkeypatch, where=where)
    training.steps(2)
    training.assert_sound()
    (part,) = History.open(history).marker(CheckpointRef(training.session.run, 2)).parts
    numel = sum(parameter.numel() for parameter in training.model.parameters())
    assert part.data_bytes / numel == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("at", [0, 777, -1])
def test_a_weight_of_a_device_that_is_not_its_master_is_stored(history, monkeypatch, where, at):
    """One bit, which no sample need see."""
    training = Training(history, monkeypatch, where=where)
    training.copy_at_once()
    training.steps(2)
    update_mixed(training.model, training.optimizer)
    with training.session.modify():
        training.model[0].weight.data.view(torch.int16).view(-1)[at] ^= 1
    training.expected[training.session.snapshot()] = known(reference(training.model, training.optimizer))
    training.steps(2)
    training.assert_sound()
    assert {step for step, how in training.how().items() if "raw" in how} == {3}


def test_a_device_that_rounds_otherwise_than_the_format_has_its_weights_stored(history, monkeypatch):
    """Its weights are its masters, as it rounds them, and no reader would ever find their bits again."""

    def towards_zero(masters, dtype):
        return (masters.view(torch.int32) >> 16).to(torch.int16)

    class Truncating(MixedAdam):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    masters = self.state[parameter]["master_param"]
                    parameter.data.view(torch.int16).copy_(towards_zero(masters, torch.bfloat16))

    monkeypatch.setattr(rounded_weights, "_rounded", towards_zero)
    rounds_as_defined.cache_clear()
    training = Training(history, monkeypatch, optimizer=Truncating)
    training.steps(3)
    training.assert_sound()
    rounds_as_defined.cache_clear()
    assert {step for step, how in training.how().items() if "raw" in how} >= {1, 2, 3}


def test_weights_that_are_rounded_otherwise_are_sampled_and_not_compared(history, monkeypatch):
    compared = []

    def counted(self, one, real=DerivedCheck._checksums_if_rounded):
        compared.append(one.part.key)
        return real(self, one)

    monkeypatch.setattr(DerivedCheck, "_checksums_if_rounded", counted)
    training = Training(history, monkeypatch, optimizer=OtherRounding)
    training.steps(5)
    training.assert_sound()
    assert not compared
    assert training.how() == {step: {"raw"} for step in range(6)}


def test_masters_that_share_no_device_with_their_weights_are_left_alone(history, monkeypatch):
    """The weights in host memory, the masters on a device: nobody keeps them so, and nothing breaks."""
    monkeypatch.setitem(WHERE, "the weights offloaded", lambda tensor: tensor.dtype == torch.float32)
    training = Training(history, monkeypatch, where="the weights offloaded")
    training.steps(2)
    training.assert_sound()
    assert training.how() == {step: {"raw"} for step in range(3)}


def test_weights_whose_elements_lie_in_another_order_are_stored(history, monkeypatch):
    training = Training(history, monkeypatch)
    training.copy_at_once()
    with training.session.modify():
        training.model[0].weight.data = training.model[0].weight.data.t().contiguous().t()
    training.steps(2)
    training.assert_sound()
    stored = {name for (_, kind, name), codec in codecs(history).items() if (kind, codec) == ("model", "raw")}
    assert stored == {"0.weight"}


def test_a_weight_that_is_given_other_memory_after_the_step_is_compared_where_it_was(history, monkeypatch):
    """`p.data = x`, as an average that is swapped in, is no write to the step's memory."""
    training = Training(history, monkeypatch)
    training.steps(2)
    weight = training.model[0].weight
    own = weight.data
    weight.data = torch.zeros_like(own)
    training.device.gate.set()
    training.session.wait()
    weight.data = own
    training.steps(1)
    training.assert_sound()
    assert training.how() == {step: {"rounded"} for step in range(4)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_rounds_as_the_format_defines_it(dtype):
    """Every upper half, and the numbers around every middle, NaN of all kinds among them; one other bit is seen."""
    assert rounds_as_defined(torch.device("cpu"), DTYPES[dtype])
    masters = torch.randn(10_000)
    weights = torch.empty(10_000, dtype=DTYPES[dtype])
    masters[::100] = float("nan")
    native.round_memory(address=masters.data_ptr(), target=weights.data_ptr(), numel=10_000, dtype=dtype)
    assert are_rounded(weights, masters)
    for at in (0, 100, 5_001, 9_999):
        weights.view(torch.int16)[at] ^= 1
        assert not are_rounded(weights, masters)
        weights.view(torch.int16)[at] ^= 1


def test_samples_of_many_weights_are_told_apart():
    pairs = []
    for numel in (1, 5, 3000, 100_000):
        for dtype in DTYPES.values():
            masters = torch.randn(numel)
            pairs.append((masters.to(dtype), masters))
    assert samples_are_rounded(pairs) == [True] * 8
    pairs[3][0].view(torch.int16)[-1] ^= 1
    pairs[6][0].view(torch.int16)[0] ^= 1
    assert [index for index, rounded in enumerate(samples_are_rounded(pairs)) if not rounded] == [3, 6]
    assert samples_are_rounded([]) == []
