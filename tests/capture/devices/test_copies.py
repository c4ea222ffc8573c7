"""Device tensors are copied beside the training, in whatever order and however late, and no checkpoint is torn."""

import errno
import threading
import warnings
from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, bits, committed_steps, make, one_step, reference
from late_device import LateDevice, late_until_the_barrier, session_on, small_writer
from torch.utils._python_dispatch import TorchDispatchMode

import capture
import native
from capture.changes.change_detector import Comparison
from capture.data_file.plan import Plan, make_plan
from capture.devices.copies import GATHERED_BYTES, Piece, coalesced
from capture.devices.feed import FeedTake
from capture.session.step_events import MAX_PENDING, StepEvents
from capture.state.interface import TensorItem
from catalog.errors import CorruptError, SnapshotError, UnsupportedError

HELD = {
    "all": lambda tensor: True,
    "matrices": lambda tensor: tensor.dim() == 2,
    "vectors": lambda tensor: tensor.dim() == 1,
    "scalars": lambda tensor: tensor.dim() == 0,
}


def train_and_compare(device: LateDevice, root: Path, *, writer: native.Writer) -> None:
    """Train and compare all checkpoints. One matrix (640 KB) is larger than the least budget, and one is not dense."""
    model, optimizer = make(400)
    model.inner.weight.data = torch.randn(400, 400).t()
    session = session_on(device, model, optimizer, root, writer=writer)
    expected = {0: reference(model, optimizer)}
    # The steps stay below the limit of pending ones, so that a broken barrier lets the training go on and not hang.
    for step in range(1, MAX_PENDING):
        one_step(model, optimizer)
        expected[step] = reference(model, optimizer)
    device.ending = True
    session.close()
    assert device.copies
    assert committed_steps(root, session.run) == sorted(expected)
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=root), state)


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("budget", ["least", "large"])
def test_late_copies_in_any_order_have_the_bytes_of_the_step(history, monkeypatch, held, budget):
    device = LateDevice(held)
    late_until_the_barrier(device, monkeypatch)
    train_and_compare(
        device, history, writer=small_writer() if budget == "least" else small_writer(budget_bytes=16 * MIB)
    )
    assert device.most_in_flight > 1 or held is HELD["scalars"] or held is HELD["vectors"]


def test_snapshots_that_queue_behind_a_slow_disk_stay_separate(history, monkeypatch):
    device = LateDevice()
    late_until_the_barrier(device, monkeypatch)
    train_and_compare(device, history, writer=small_writer(budget_bytes=8 * MIB, delay_us=400, reorder=True))


def test_without_the_barrier_the_same_training_is_torn(history, monkeypatch):
    device = LateDevice()
    late_until_the_barrier(device, monkeypatch)
    monkeypatch.setattr(StepEvents, "before_update", lambda self: None)
    monkeypatch.setattr(Comparison, "changed", lambda self: [])
    with pytest.raises((AssertionError, CorruptError), match=r"torn|checksum"):
        train_and_compare(device, history, writer=small_writer())


@pytest.mark.guards("The training goes on")
@pytest.mark.filterwarnings("ignore:the snapshot")
def test_a_disk_that_fails_midway_fails_the_snapshot_and_not_the_training(history, monkeypatch):
    device = LateDevice()
    late_until_the_barrier(device, monkeypatch)
    writer = small_writer(fail_after=12, errno=errno.ENOSPC)
    model, optimizer = make(400)
    session = session_on(device, model, optimizer, history, writer=writer)
    for _ in range(3):
        one_step(model, optimizer)
    device.ending = True
    session.close()
    assert "No space left" in str(session.failures[-1])
    assert committed_steps(history, session.run) == []
    assert writer.staging[0] == 0, "a slot is still out"
    assert device.pinned == set()


@pytest.mark.parametrize("when", ["fails_to_begin", "fails_to_end"])
def test_a_device_failure_fails_the_snapshot_with_the_devices_message(history, monkeypatch, when):
    device = LateDevice(**{when: (3 if when == "fails_to_begin" else [3, 4], RuntimeError("no memory to gather in"))})
    late_until_the_barrier(device, monkeypatch)
    model, optimizer = make(400)
    writer = small_writer()
    session = session_on(device, model, optimizer, history, writer=writer)

    def train() -> None:
        for _ in range(3):
            one_step(model, optimizer)
        device.ending = True
        # The committer's pace decides where the failure shows first: at a step as a warning, or at the end as an error.
        try:
            session.close()
        except SnapshotError as error:
            warnings.warn(str(error), stacklevel=1)

    with pytest.warns(UserWarning, match="fed to the writer can't be copied: no memory to gather in"):
        train()
    assert committed_steps(history, session.run) == [1, 2, 3]
    assert device.waited == device.begun, "a slot has gone back under its copy"
    assert writer.staging[0] == 0, "a slot is still out"
    assert device.pinned == set()


def items_of_all_sorts() -> list[TensorItem]:
    torch.manual_seed(3)
    tensors = {
        "matrix": torch.randn(300, 400),
        "turned": torch.randn(70, 90).t(),
        "half": torch.randn(33_333).bfloat16(),
        "flags": torch.randn(777) > 0,
        "counts": torch.arange(501),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        **{f"small{i}": torch.randn(i % 37 + 1) for i in range(200)},
    }
    return [
        TensorItem(name, "model", tuple(tensor.shape), tensor, when="eager" if i % 5 == 0 else "lazy")
        for i, (name, tensor) in enumerate(tensors.items())
    ]


def take(plan: Plan, writer: native.Writer, device: LateDevice) -> FeedTake:
    offsets, parts = zip(*plan.fed_parts, strict=True)
    return FeedTake(parts, offsets, end=plan.data_end, writer=writer, copies=device)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("held", ["all", "some"])
def test_every_share_of_every_sort_of_tensor_is_written(tmp_path, rank, held):
    items = items_of_all_sorts()
    device = LateDevice(lambda tensor: held == "all" or tensor.numel() % 2 == 0)
    plan = make_plan(items, rank=rank, world_size=3, align=4096, reserve=(), copies=device)
    writer = small_writer(reorder=True)
    taken = take(plan, writer, device)
    expected = [bits(part.item.tensor) for part in plan.parts]
    for mirror in plan.mirrors:
        mirror.host.copy_(mirror.source)
    job = writer.start(plan.write, str(tmp_path / "f"))
    for item in items:
        if item.when == "eager":
            item.tensor.zero_()
    copies = taken.feed(job)
    device.gate.set()
    copies.wait()
    job.release()
    for item in items:
        item.tensor.zero_()
    assert job.wait()
    job.finish(header=bytes(plan.data_start), trailer=b"")
    landed = (tmp_path / "f").read_bytes()
    for part, offset, whole in zip(plan.parts, plan.offsets, expected, strict=True):
        begin = (part.start - part.item.start) * part.itemsize
        assert landed[offset : offset + part.nbytes] == whole[begin : begin + part.nbytes], part.key


@pytest.mark.parametrize("how", ["abort", "close"])
def test_the_barrier_ends_when_the_snapshot_does(tmp_path, how):
    """Copies in flight end first, because their slots stay reserved until then."""
    device = LateDevice()
    items = [TensorItem("w", "model", (MIB,), torch.zeros(MIB))]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=(), copies=device)
    writer = small_writer()
    free = writer.budget_free_bytes()
    job = writer.start(plan.write, str(tmp_path / "f"))
    copies = take(plan, writer, device).feed(job)
    while device.most_in_flight < 2:
        pass
    end = threading.Thread(target=job.abort if how == "abort" else writer.close)
    end.start()
    end.join()
    assert writer.staging[0] != 0
    assert writer.budget_free_bytes() <= free - 2 * (64 << 10)
    device.gate.set()
    copies.wait()
    assert copies.failure is None
    assert writer.budget_free_bytes() == (free if how == "abort" else 0)
    assert (writer.staging[0] == 0) == (how == "close")


@pytest.mark.parametrize(("count", "numel", "block"), [(2000, 100, 64 << 10), (40, 64 << 10, 4 * MIB)])
def test_many_small_tensors_take_few_copies(tmp_path, count, numel, block):
    device = LateDevice()
    items = [TensorItem(f"t{i}", "model", (numel,), torch.full((numel,), float(i))) for i in range(count)]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=(), copies=device)
    writer = native.Writer(backend="posix", budget_bytes=8 * block, block_bytes=block)
    job = writer.start(plan.write, str(tmp_path / "f"))
    device.gate.set()
    take(plan, writer, device).feed(job).wait()
    assert job.wait()
    assert device.copies == -(-count * numel * 4 // block)


@pytest.mark.parametrize("order", ["channels last", "with gaps"])
def test_moments_in_another_order_are_not_cloned(tmp_path, order):
    """They are read as late as others, block by block; a tensor of 2 MiB passes through a budget of 384 KiB."""
    device = LateDevice()
    moment = torch.randn(64, 32, 16, 16)
    moment = moment.to(memory_format=torch.channels_last) if order == "channels last" else moment[:, :, ::2]
    items = [TensorItem("w", "exp_avg", tuple(moment.shape), moment)]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=(), copies=device)
    writer = small_writer()
    with _Operations() as operations:
        taken = take(plan, writer, device)
    assert operations.names == []
    assert plan.live_parts
    job = writer.start(plan.write, str(tmp_path / "f"))
    copies = taken.feed(job)
    expected = bits(moment.neg_())
    device.gate.set()
    copies.wait()
    assert job.wait()
    job.finish(header=bytes(plan.data_start), trailer=b"")
    (offset,) = plan.offsets
    assert (tmp_path / "f").read_bytes()[offset : offset + moment.nbytes] == expected


def test_a_step_inside_a_graph_that_is_captured_is_refused_and_nothing_recorded(history):
    device = LateDevice()
    device.gate.set()
    model, optimizer = make()
    session = session_on(device, model, optimizer, history, writer=small_writer(), check="hash", every=100)
    one_step(model, optimizer)
    session.wait()
    device.recording = True
    with _Operations() as operations:
        with pytest.raises(UnsupportedError, match="graph"):
            session.snapshot()
        session._events.current.keep(1)
        session._events.before_update()
    assert operations.names == []
    device.recording = False
    session._events.current.update_ended()
    assert session.snapshot() == 1
    session.close()
    assert committed_steps(history, session.run) == [0, 1]


class _Operations(TorchDispatchMode):
    """Counts the operations that are given to the device: each that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_many_small_tensors_to_be_kept_take_one_operation(tmp_path):
    device = LateDevice()
    items = [
        TensorItem(
            f"t{i}", "step", (), torch.full((), float(i), dtype=torch.float64 if i % 2 else torch.float32), when="eager"
        )
        for i in range(2000)
    ]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=(), copies=device)
    writer = small_writer()
    with _Operations() as operations:
        taken = take(plan, writer, device)
    assert operations.names == ["cat.default", "cat.default"]
    job = writer.start(plan.write, str(tmp_path / "f"))
    expected = [bits(part.item.tensor) for part in plan.parts]
    for item in items:
        item.tensor.zero_()
    device.gate.set()
    taken.feed(job).wait()
    assert job.wait()
    job.finish(header=bytes(plan.data_start), trailer=b"")
    landed = (tmp_path / "f").read_bytes()
    assert [
        landed[offset : offset + part.nbytes] for part, offset in zip(plan.parts, plan.offsets, strict=True)
    ] == expected


def test_only_small_neighbours_are_gathered():
    small, other = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.int8)
    large = torch.zeros(GATHERED_BYTES, dtype=torch.uint8)
    behind = 401 + GATHERED_BYTES
    pieces = [
        Piece([source], at, len(source), source.dtype)
        for source, at in ((small, 0), (small, 100), (small, 201), (other, 301), (large, 401), (small, behind))
    ]
    gathered = coalesced(pieces)
    assert [(piece.position, piece.nbytes) for piece in gathered] == [
        *((0, 200), (201, 100), (301, 100), (401, GATHERED_BYTES), (behind, 100))
    ]
    assert torch.equal(gathered[0].joined(), torch.cat([small, small]))
    assert gathered[3].joined().data_ptr() == large.data_ptr()


def test_only_a_ranks_share_of_a_device_tensor_is_fed():
    items = [TensorItem(name, "model", (1000,), torch.zeros(1000)) for name in "ab"]
    device = LateDevice()
    for rank in range(4):
        plan = make_plan(items, rank=rank, world_size=4, align=4096, reserve=(), copies=device)
        assert [(part.begin, part.nbytes) for _, part in plan.fed_parts] == [(500 * (rank % 2), 2000)]
        assert plan.mirrors == ()


def test_device_tensors_come_last_on_separate_pages():
    items = items_of_all_sorts()
    device = LateDevice(lambda tensor: tensor.numel() % 2 == 0)
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=(), copies=device)
    fed = [part.device is not None for part in plan.parts]
    assert fed == sorted(fed)
    assert plan.offsets[fed.index(True)] % 4096 == 0
    assert {mirror.source.is_contiguous() for mirror in plan.mirrors} <= {False}


def test_without_device_tensors_nothing_is_copied_or_fed():
    items = [
        TensorItem("w", "model", (10,), torch.zeros(10)),
        TensorItem("b", "buffer", (3,), torch.zeros(3), when="eager"),
    ]
    plan = make_plan(items, rank=0, world_size=1, align=4096, reserve=())
    assert plan.mirrors == plan.fed_parts == ()


def test_an_unsupported_device_is_refused_by_name():
    items = [TensorItem("w", "model", (10,), torch.zeros(10, device="meta"))]
    with pytest.raises(UnsupportedError, match="'w'"):
        make_plan(items, rank=0, world_size=1, align=4096, reserve=())
