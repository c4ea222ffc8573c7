"""Every step leaves a fingerprint of the state that the next step starts from, captured or not; nothing needs it."""

import numpy as np
import pytest
import torch
from catalog_helpers import Run
from late_device import LateDevice, session_on, small_writer

import capture
from capture.changes.fingerprints import Fingerprint
from capture.publishing import fingerprint_log
from catalog.errors import SetupError
from catalog.format.fingerprints import TensorTable, TracedTensor
from catalog.format.segments import segments
from catalog.history import History
from catalog.paths import HistoryPaths
from catalog.read.fingerprints import fingerprints_of
from catalog.verify import verify


def train(history, *, steps=6, every=4, edited=None, nudged=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2000))
    optimizer = torch.optim.AdamW(model.parameters())
    with capture.enable(model, optimizer=optimizer, every=every, history=history, stats_every=0, **options) as session:
        for step in range(1, steps + 1):
            model(torch.randn(4, 6)).square().mean().backward()
            if step == nudged:
                model[2].bias.grad[1999] += 1e-3
            optimizer.step()
            optimizer.zero_grad()
            if step == edited:
                with session.modify(), torch.no_grad():
                    model[0].weight.mul_(0.5)
    return History.open(history), session.run


def found(history, run, rank=0):
    return {one.step: one for one in fingerprints_of(history.paths, run, rank)}


def differing(one, other):
    assert one.table.tensors == other.table.tensors
    return {one.table.tensors[index].label for index in np.flatnonzero(one.digests != other.digests)}


def test_every_step_has_one_whatever_is_captured(tmp_path):
    history, run = train(tmp_path / "h")
    again, other = train(tmp_path / "h", every=1)
    one, two = found(history, run), found(again, other)
    assert list(one) == list(two) == list(range(7))
    for step in one:
        assert not differing(one[step], two[step])
    assert differing(one[1], one[2]) == {tensor.label for tensor in one[1].table.tensors}
    assert len(one[0].table.tensors) == 9
    assert {tensor.kind for tensor in one[1].table.tensors} == {"model", "buffer", "exp_avg", "exp_avg_sq", "step"}
    coverage = {tensor.label: tensor.coverage for tensor in one[1].table.tensors}
    assert coverage["model '2.weight'"] == "sampled"
    assert coverage["model '0.weight'"] == "whole"
    assert verify(history) == []


@pytest.mark.parametrize("check", ["versions", "hash"])
def test_what_is_read_of_a_tensor_is_said(tmp_path, check):
    history, run = train(tmp_path / "h", check=check)
    tensors = found(history, run)[3].table.tensors
    assert {tensor.coverage for tensor in tensors} == ({"hash"} if check == "hash" else {"whole", "sampled"})
    if check == "versions":
        sampled, other = train(tmp_path / "h", check="sampled")
        assert not differing(found(history, run)[3], found(sampled, other)[3])


def test_one_element_that_differs_is_found_where_all_bytes_are_read(tmp_path):
    plain, run = train(tmp_path / "h", check="hash")
    nudged, other = train(tmp_path / "h", check="hash", nudged=3)
    one, two = found(plain, run), found(nudged, other)
    assert not differing(one[2], two[2])
    assert differing(one[3], two[3]) == {"model '2.bias'", "exp_avg '2.bias'", "exp_avg_sq '2.bias'"}


@pytest.mark.parametrize("edited", [3, 4])
def test_a_declared_edit_is_part_of_the_step(tmp_path, edited):
    """Step 3 is not captured, step 4 is: either has the fingerprint of what the next step starts from."""
    plain, run = train(tmp_path / "h")
    changed, other = train(tmp_path / "h", edited=edited)
    one, two = found(plain, run), found(changed, other)
    assert differing(one[edited], two[edited]) == {"model '0.weight'"}
    assert not differing(one[edited - 1], two[edited - 1])


def test_they_are_left_out_where_nobody_wants_them(tmp_path):
    history, run = train(tmp_path / "h", fingerprints=False)
    assert found(history, run) == {}
    assert history.run_facts(run).facts["fingerprints"] is False
    with pytest.raises(SetupError, match="fingerprints=1: give True or False"):
        train(tmp_path / "h", fingerprints=1)


@pytest.mark.filterwarnings("error")
@pytest.mark.guards("A full or failing disk costs that snapshot only")
def test_fingerprints_that_can_not_be_written_cost_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_log.FingerprintWriter, "publish", _failing)
    history, run = train(tmp_path / "h")
    assert history.steps(run) == [0, 4, 6]
    assert list(segments(history.paths.fingerprints_dir(run))) == []
    (event,) = history.query("SELECT detail FROM events WHERE name = 'fingerprints_failed'").to_pylist()
    assert "no space" in event["detail"]


def _failing(self, rows):
    raise OSError(28, "no space")


def test_a_device_takes_its_own_and_is_waited_for_in_the_background(tmp_path):
    """Its digests are those of the same bytes in every session; the host reads no memory of a device."""
    seen = []
    for folder, steps in (("a", 4), ("b", 3)):
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device = LateDevice(lambda tensor: tensor.numel() > 60)
        session = session_on(
            device, model, optimizer, tmp_path / folder, writer=small_writer(), every=100, stats_every=0
        )
        device.gate.set()
        for step in range(steps):
            model(torch.full((2, 30), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        device.ending = True
        session.close()
        seen.append(found(History.open(tmp_path / folder), session.run))
    coverage = {tensor.name: tensor.coverage for tensor in seen[0][1].table.tensors}
    assert coverage == {"weight": "device", "bias": "whole"}
    assert list(seen[0]) == [0, 1, 2, 3, 4]
    for step in range(4):
        assert not differing(seen[0][step], seen[1][step])
    assert differing(seen[0][3], seen[0][4]) == {"model 'weight'", "model 'bias'"}


def test_more_than_memory_is_meant_for_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_log, "_MOST_BYTES", 500)
    history, run = train(tmp_path / "h", every=100)
    assert list(found(history, run)) == [0, 1]
    (event,) = history.query("SELECT step, detail FROM events WHERE name = 'fingerprints_left_out'").to_pylist()
    assert event["step"] == 2
    assert "5 steps, 2 to 6" in event["detail"]


def test_many_steps_are_written_before_a_minute_is_over(history, monkeypatch):
    monkeypatch.setattr(fingerprint_log, "_WRITTEN_AT_BYTES", 400)
    table = TensorTable((TracedTensor("model", "w", "F32", (3,), 0, 3, "replicated", "whole"),) * 20)
    with Run(history) as run:
        log = fingerprint_log.FingerprintLog(run.writers[0])
        asked = [log.add(Fingerprint(step, table, [np.zeros(20, "V8")], ())) for step in range(3)]
        assert asked == [False, False, True]
        log.write_now_and_then()
        assert list(found(History.open(history), run.run)) == [0, 1, 2]
        assert not log.add(Fingerprint(3, table, [np.zeros(20, "V8")], ()))
        log.write_now_and_then()
        assert list(found(History.open(history), run.run)) == [0, 1, 2], "a moment ago it was written"
        log.close()
    assert list(found(History.open(history), run.run)) == [0, 1, 2, 3]
    assert len(list(segments(HistoryPaths(history).fingerprints_dir(run.run)))) == 1
