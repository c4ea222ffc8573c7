"""A real CUDA device: files contain the state of the step, whatever its streams do meanwhile."""

import ctypes
import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_helpers import MIB, assert_same, make, reference
from mixed_precision import codecs, mixed

import capture
import native
from capture.data_file.plan import Plan, make_plan
from capture.devices.copies import CUDA
from capture.devices.feed import FeedTake
from capture.devices.rounded_weights import rounds_as_defined
from capture.state.interface import TensorItem
from catalog.errors import UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = MIB
BUDGET = 2 * BLOCK + 4 * (64 << 10)
LONG = 100_000_000
"""The number of cycles for which a stream is kept busy: tens of milliseconds."""


def small_writer() -> native.Writer:
    return native.Writer(backend="posix", budget_bytes=BUDGET, block_bytes=BLOCK)


def plan_of(tensors: list[torch.Tensor], **when: str) -> Plan:
    items = [TensorItem(f"t{i}", "model", tuple(tensor.shape), tensor, **when) for i, tensor in enumerate(tensors)]
    return make_plan(items, rank=0, world_size=1, align=4096, reserve=())


def take(plan: Plan, writer: native.Writer) -> FeedTake:
    offsets, parts = zip(*plan.fed_parts, strict=True)
    return FeedTake(parts, offsets, end=plan.data_end, writer=writer, copies=CUDA)


def landed(job: native.WriteJob, plan: Plan, path: Path) -> dict[str, bytes]:
    assert job.wait()
    job.finish(header=bytes(plan.data_start), trailer=b"")
    content = path.read_bytes()
    return {
        part.item.name: content[offset : offset + part.nbytes]
        for part, offset in zip(plan.parts, plan.offsets, strict=True)
    }


def test_a_training_whose_state_is_larger_than_the_budget(history):
    model, optimizer = make(1500)
    model.cuda()
    expected = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=history, budget_bytes=40 * MIB) as session:
        for step in range(1, 6):
            model(torch.randn(8, 1500, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = reference(model, optimizer)
            expected[step] = {k: {n: t.cpu() for n, t in tensors.items()} for k, tensors in state.items()}
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


@pytest.mark.parametrize("when", ["lazy", "eager"])
def test_copies_are_behind_the_step_and_before_the_next_update(tmp_path, when):
    """The training's stream is still busy when the step is captured, and writes again right after the barrier."""
    tensor = torch.zeros(4 * BUDGET // 4, device="cuda")
    writer = small_writer()
    plan = plan_of([tensor], when=when)
    torch.cuda._sleep(LONG)
    tensor.fill_(1)
    taken = take(plan, writer)
    if when == "eager":
        tensor.fill_(2)
    job = writer.start(plan.write, str(tmp_path / "f"))
    copies = taken.feed(job)
    copies.wait()
    tensor.fill_(2)
    assert copies.failure is None
    found = np.frombuffer(landed(job, plan, tmp_path / "f")["t0"], dtype=np.float32)
    assert (found == 1).all()


def test_ten_thousand_small_tensors_of_every_dtype(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
    tensors = [torch.randint(0, 2, (i % 300 + 1,), device="cuda").to(dtypes[i % 6]) for i in range(10_000)]
    tensors.append(torch.randn(200, 300, device="cuda").t())
    expected = [t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    writer = small_writer()
    plan = plan_of(tensors)
    job = writer.start(plan.write, str(tmp_path / "f"))
    take(plan, writer).feed(job).wait()
    found = landed(job, plan, tmp_path / "f")
    assert [found[f"t{i}"] for i in range(len(tensors))] == expected


def test_the_staging_memory_is_pinned_as_long_as_its_writer():
    writer = small_writer()
    address, nbytes = writer.staging
    memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    assert not memory.is_pinned()
    CUDA.pin(writer)
    CUDA.pin(writer)
    assert memory.is_pinned()
    CUDA.unpin(writer)
    CUDA.unpin(writer)
    assert not memory.is_pinned()
    CUDA.pin(writer)
    del memory, writer
    gc.collect()
    again = small_writer()
    CUDA.pin(again)
    CUDA.unpin(again)


def test_a_snapshot_inside_a_captured_graph_is_refused_by_name(tmp_path):
    tensor = torch.zeros(1000, device="cuda")
    plan = plan_of([tensor])
    writer = small_writer()
    take(plan, writer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(UnsupportedError, match="CUDA graph"):
            take(plan, writer)
    graph.replay()
    torch.cuda.synchronize()
    assert (tensor == 1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_feeder_stays_on_its_device():
    tensor = torch.ones(BUDGET, device="cuda:1")
    CUDA.begin([tensor])
    used = []

    def feed() -> None:
        CUDA.enter_thread(tensor.device)
        used.append(torch.cuda.current_device())

    thread = threading.Thread(target=feed)
    thread.start()
    thread.join()
    assert used == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_device_rounds_as_the_format_defines_it(dtype):
    assert rounds_as_defined(torch.device("cuda", 0), dtype)


@pytest.mark.parametrize("offloaded", [False, True], ids=["masters on the device", "masters in host memory"])
def test_weights_that_are_their_masters_are_not_stored(history, offloaded):
    """The device's own update rounds them, and the next one comes as soon as the barrier lets it."""
    model, optimizer = mixed(1500, torch.bfloat16)
    model.cuda()
    if not offloaded:
        for state in optimizer.state.values():
            state.update({key: value.cuda() for key, value in state.items()})
    expected = {}
    with capture.enable(model, optimizer=optimizer, every=1, history=history, budget_bytes=40 * MIB) as session:
        for step in range(1, 6):
            model(torch.randn(8, 1500, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = reference(model, optimizer)
            expected[step] = {k: {n: t.cpu() for n, t in tensors.items()} for k, tensors in state.items() if tensors}
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)
    assert {codec for (_, kind, _), codec in codecs(history).items() if kind == "model"} == {"rounded"}
