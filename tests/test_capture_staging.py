"""Device tensors are copied beside the training, in whatever order and however late, and no checkpoint is torn.

There is no device here: a deterministic one stands in that copies as late as the protocol allows, last tensor first.
"""

import datetime
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, make, one_step, reference

import capture
import native
from capture.intact import Witness
from capture.items import TensorItem
from capture.loops import loop_for
from capture.plan import make_plan
from capture.providers import RandomState
from capture.session import Session
from capture.source import Source
from capture.staging import Copies, Mirror
from catalog.errors import CorruptError, SnapshotError, UnsupportedError
from catalog.records import RunFacts
from catalog.run import RunWriter, create_history, create_run, new_run_id


class LateCopies:
    """Done when the training waits for them, not before; everybody else waits for that."""

    def __init__(self, mirrors: Sequence[Mirror], training: int) -> None:
        self._mirrors = mirrors
        self._training = training
        self._arrived = threading.Event()

    def wait(self) -> None:
        if threading.get_ident() == self._training and not self._arrived.is_set():
            for mirror in reversed(self._mirrors):
                mirror.host.copy_(mirror.source)
            self._arrived.set()
        self._arrived.wait()


class LateDevice:
    """A device that holds every tensor for which `held` is true."""

    def __init__(self, held=lambda tensor: True) -> None:
        self._held = held
        self._training = threading.get_ident()
        self.copied: list[Mirror] = []

    def owns(self, tensor: torch.Tensor) -> bool:
        return bool(self._held(tensor))

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, 113, memory_format=torch.contiguous_format)

    def copy(self, mirrors: Sequence[Mirror]) -> Copies:
        self.copied += mirrors
        for mirror in mirrors:
            if mirror.eager:
                mirror.host.copy_(mirror.source)
        return LateCopies([mirror for mirror in mirrors if not mirror.eager], self._training)


def session_on(device: LateDevice, model, optimizer, root: Path, *, faults: native.Faults | None = None) -> Session:
    create_history(root)
    facts = RunFacts(new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(), 1, None, None, "layout", {})
    create_run(root, facts)
    loop = loop_for(model, optimizer=optimizer)
    source = Source([*loop.providers(), RandomState()], rank=0, world_size=1, align=4096, copies=device)
    run = RunWriter(root, run=facts.run, rank=0, world_size=1, layout="layout")
    engine = native.Engine(backend="posix", budget_bytes=16 * MIB, faults=faults)
    return Session(loop, source, run=run, engine=engine, every=1, on_full="wait")


def train_and_compare(device: LateDevice, root: Path) -> None:
    model, optimizer = make(300)
    model.inner.weight.data = torch.randn(300, 300).t()
    session = session_on(device, model, optimizer, root)
    expected = {0: reference(model, optimizer)}
    for step in range(1, 5):
        one_step(model, optimizer)
        expected[step] = reference(model, optimizer)
    session.close()
    assert device.copied
    assert committed_steps(root, session.run) == sorted(expected)
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=root), state)


HELD = {
    "all": lambda tensor: True,
    "matrices": lambda tensor: tensor.dim() == 2,
    "vectors": lambda tensor: tensor.dim() == 1,
    "scalars": lambda tensor: tensor.dim() == 0,
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
def test_late_copies_in_any_order_are_those_of_the_step(history, held):
    train_and_compare(LateDevice(held), history)


def test_without_the_barrier_the_same_training_is_torn(history, monkeypatch):
    monkeypatch.setattr(Session, "before_update", lambda self: None)
    monkeypatch.setattr(Witness, "moved", lambda self: [])
    with pytest.raises((AssertionError, CorruptError), match=r"torn|checksum"):
        train_and_compare(LateDevice(), history)


@pytest.mark.filterwarnings("ignore:the snapshot")
def test_a_file_that_can_not_be_begun_late_fails_its_snapshot_only(history):
    """The step's folder is gone by the time the copies have arrived."""
    model, optimizer = make()
    session = session_on(LateDevice(), model, optimizer, history)
    one_step(model, optimizer)
    one_step(model, optimizer)
    (history / "runs" / session.run / "steps" / f"{2:012d}").rename(history / "away")
    one_step(model, optimizer)
    session.before_access("the end")
    with pytest.raises(SnapshotError, match="step 2"):
        session.wait()
    session.close()
    assert committed_steps(history, session.run) == [0, 1, 3]


def test_only_a_ranks_share_of_a_device_tensor_is_mirrored():
    items = [TensorItem(name, "model", (1000,), torch.zeros(1000)) for name in "ab"]
    device = LateDevice()
    for rank in range(4):
        plan = make_plan(items, rank=rank, world_size=4, align=4096, reserve=(), copies=device)
        assert [mirror.host.numel() for mirror in plan.device_mirrors] == [500]
        assert plan.mirrors == ()


def test_without_device_tensors_nothing_is_mirrored():
    items = [
        TensorItem("w", "model", (10,), torch.zeros(10)),
        TensorItem("b", "buffer", (3,), torch.zeros(3), when="eager"),
    ]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=())
    assert plan.mirrors == plan.device_mirrors == ()


def test_a_device_that_nobody_can_copy_from_is_refused_by_name():
    items = [TensorItem("w", "model", (10,), torch.zeros(10, device="meta"))]
    with pytest.raises(UnsupportedError, match="'w'"):
        make_plan(items, rank=0, world_size=1, align=4096, reserve=())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_training_on_a_real_device(history):
    model, optimizer = make(300)
    model.cuda()
    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        expected = {}
        for step in range(1, 6):
            model(torch.randn(8, 300, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = reference(model, optimizer)
            expected[step] = {k: {n: t.cpu() for n, t in tensors.items()} for k, tensors in state.items()}
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)
