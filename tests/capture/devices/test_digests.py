"""Devices find writes to their memory that torch does not count: by a sample by default, wholly with check="hash"."""

import pytest
import torch
from capture_helpers import assert_same, committed_steps, make, one_step, reference
from late_device import LateDevice, session_on, small_writer

import capture
from capture.devices.digests import DeviceDigests, sample_of, words_of
from catalog.errors import SnapshotError

ROW = 1 << 16


def swap_in_average(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) + 0.5)


def negate_one(model: torch.nn.Module) -> None:
    model.inner.weight.data.view(-1)[12_345].neg_()


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    flat = torch.randn(2 * ROW + 11).bfloat16()
    return {
        "rows": torch.randn(3 * ROW + 5),
        "one": torch.tensor(2.0),
        "turned": torch.randn(30, 50).t(),
        "channels": torch.randn(4, 8, 5, 5).to(memory_format=torch.channels_last),
        "flags": torch.randn(777) > 0,
        "wide": torch.randn(999, dtype=torch.float64),
        "odd": flat[1:1001],
        "half": flat[1002:],
        **{f"small{i}": torch.randn(i + 1) for i in range(50)},
    }


def digests(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    words = {name: words_of(value) for name, value in values.items()}
    assert None not in words.values()
    return dict(zip(words, DeviceDigests(list(words.values())).read().digests(), strict=True))


def test_every_change_of_one_element_changes_the_digest_of_its_tensor_alone():
    values = tensors()
    before = digests(values)
    assert len(set(before.values())) == len(before)
    assert digests(values) == before
    for name, value in values.items():
        for place in {0, value.numel() // 2, value.numel() - 1}:
            index = torch.unravel_index(torch.tensor(place), value.shape)
            kept = value[index].clone()
            value[index] = ~kept if value.dtype == torch.bool else -kept
            after = digests(values)
            assert [other for other in values if after[other] != before[other]] == [name]
            value[index] = kept
    assert digests(values) == before


@pytest.mark.parametrize("numel", [1000, 2 * ROW])
def test_changes_that_a_sum_without_care_would_miss(numel):
    """Two signs, a swap, a shift, and a carry from one word to the next: sums of 64-bit words with odd weights, or with
    equal ones, miss some of them.
    """
    value = torch.randn(numel)
    before = digests({"value": value})
    first, second = value[1].clone(), value[3].clone()
    changes = {"signs": (-first, -second), "swap": (second, first), "zeros": (0 * first, -0.0 * first)}
    seen = {before["value"]}
    for pair in changes.values():
        value[1], value[3] = pair
        seen.add(digests({"value": value})["value"])
    value[1], value[3] = first, second
    seen.add(digests({"value": value.roll(1)})["value"])
    assert len(seen) == 5
    assert digests({"value": value}) == before


def test_a_digest_does_not_depend_on_the_tensors_beside_it():
    """Frozen tensors are compared in whatever company they are then."""
    vectors = [torch.randint(-(1 << 31), (1 << 31) - 1, (n,), dtype=torch.int32) for n in (1, 3, 160, 40_000, 70_000)]
    alone = [DeviceDigests([vector]).read().digests()[0] for vector in vectors]
    assert DeviceDigests(vectors).read().digests() == alone
    assert DeviceDigests(vectors[::-1]).read().digests() == alone[::-1]


def test_a_sample_meets_every_column():
    """The distance between the words of a sample has no factor in common with the length of usual rows."""
    matrix = torch.arange(4096 * 1024, dtype=torch.int32).view(4096, 1024)
    columns = sample_of(matrix.view(-1)) % 1024
    assert len(columns.unique()) == 1024


def test_memory_with_gaps_has_no_digest():
    assert words_of(torch.randn(8, 8)[:, ::2]) is None


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize(("check", "write"), [("sampled", swap_in_average), ("hash", negate_one)])
def test_an_uncounted_write_to_a_device_fails_the_snapshot_by_name(history, check, write):
    """The write comes after the step and before the copies."""
    device = LateDevice()
    device.gate.set()
    model, optimizer = make(200)
    session = session_on(device, model, optimizer, history, writer=small_writer(), check=check)
    session.wait()
    device.gate.clear()
    one_step(model, optimizer)
    versions = [parameter._version for parameter in model.parameters()]
    write(model)
    assert versions == [parameter._version for parameter in model.parameters()]
    device.gate.set()
    with pytest.raises(SnapshotError, match=r"step 1.*inner\.weight'.*written to.*step 1.*session\.modify"):
        session.wait()
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    session.close()
    assert committed_steps(history, session.run) == [0, 2]
    assert_same(capture.restore(f"{session.run}:2", history=history), expected)


@pytest.mark.parametrize("check", ["versions", "sampled", "hash"])
def test_a_step_of_a_device_is_captured_late_only_as_it_was(history, check):
    device = LateDevice()
    device.gate.set()
    model, optimizer = make(200)
    session = session_on(device, model, optimizer, history, writer=small_writer(), check=check, every=100)
    one_step(model, optimizer)
    expected = reference(model, optimizer)
    assert session.snapshot() == 1
    one_step(model, optimizer)
    swap_in_average(model)
    if check == "versions":
        session.close()
        assert committed_steps(history, session.run) == [0, 1, 2]
        return
    with pytest.warns(UserWarning, match=r"step 2 can't be captured any more: model 'inner\.weight'"):
        session.close()
    assert committed_steps(history, session.run) == [0, 1]
    assert_same(capture.restore(f"{session.run}:1", history=history), expected)


@pytest.mark.guards("The training goes on")
@pytest.mark.filterwarnings("ignore:the snapshot")
def test_a_device_that_can_not_compare_fails_the_snapshot_and_not_the_training(history, monkeypatch):
    """At the barrier, and when the last step is captured late."""
    device = LateDevice()
    device.gate.set()
    model, optimizer = make(200)
    session = session_on(device, model, optimizer, history, writer=small_writer(), every=2)
    one_step(model, optimizer)
    session.wait()
    device.gate.clear()
    one_step(model, optimizer)
    read = DeviceDigests.read

    def out_of_memory(digests: DeviceDigests) -> None:
        raise torch.OutOfMemoryError("no memory for a digest")

    monkeypatch.setattr(DeviceDigests, "read", out_of_memory)
    device.gate.set()
    one_step(model, optimizer)
    with pytest.raises(SnapshotError, match=r"step 2 .*the device can't compare its memory: no memory for a digest"):
        session.wait()
    monkeypatch.setattr(DeviceDigests, "read", read)
    one_step(model, optimizer)
    one_step(model, optimizer)
    session.wait()
    monkeypatch.setattr(DeviceDigests, "read", out_of_memory)
    session.close()
    assert "can't compare its memory" in str(session.failures[-1])
    assert committed_steps(history, session.run) == [0, 4]
