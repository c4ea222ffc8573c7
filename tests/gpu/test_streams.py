"""A real CUDA device: what one stream computes is read behind it, and what stays the same is not copied again."""

import datetime
from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, make, reference

import capture
from capture.devices.digests import DeviceDigests, words_of
from capture.loops.step_metrics import Losses
from capture.publishing.committer import Committer
from catalog.errors import SnapshotError
from catalog.history import History
from catalog.records import RunFacts
from catalog.run_writer import RunWriter, create_history, create_run, new_run_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 100_000_000
"""The number of cycles for which a stream is kept busy: tens of milliseconds."""


def on_host(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: {name: tensor.cpu() for name, tensor in tensors.items()} for kind, tensors in state.items()}


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, model.inner.in_features, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run_of(root: Path) -> RunWriter:
    create_history(root)
    facts = RunFacts(new_run_id(), datetime.datetime.now(datetime.UTC).isoformat(), 1, None, None, "layout", {})
    create_run(root, facts)
    return RunWriter(root, run=facts.run, rank=0, world_size=1, layout_hash="layout")


def test_a_loss_of_a_busy_stream_is_read_when_it_is_computed(history):
    run = run_of(history)
    committer = Committer(run, stats_every=0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loss = torch.zeros((), device="cuda")
        torch.cuda._sleep(LONG)
        loss.fill_(2.5)
        committer.metrics(1, {"loss": loss})
    committer.close()
    run.close()
    rows = History.open(history).query("SELECT value FROM metrics").to_pylist()
    assert rows == [{"value": 2.5}]


def test_a_mean_of_losses_is_taken_behind_the_streams_that_compute_them():
    losses = Losses()
    for value in (1.0, 2.0, 6.0):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG)
            losses.add(torch.full((), value, device="cuda"))
    mean = losses.take_mean()
    assert mean is not None
    assert float(mean) == 3.0


def test_a_loss_inside_a_captured_graph_is_left_out():
    losses = Losses()
    graph = torch.cuda.CUDAGraph()
    value = torch.ones((), device="cuda")
    with torch.cuda.graph(graph):
        losses.add(value + 1)
    graph.replay()
    assert losses.take_mean() is None


def test_the_digests_of_a_device_are_those_of_the_host():
    torch.manual_seed(3)
    flat = torch.randn(200_011).bfloat16()
    tensors = [torch.randn(9_000_000), flat[1:1001], flat[1002:], torch.randn(70, 90).t(), torch.randn(777) > 0]
    tensors += [torch.randn(i + 1) for i in range(300)]

    def digests(device: str) -> list[bytes]:
        words = [words_of(tensor.to(device)) for tensor in tensors]
        return DeviceDigests([one for one in words if one is not None]).read().digests()

    assert digests("cuda") == digests("cuda") == digests("cpu")


@pytest.mark.parametrize("check", ["sampled", "hash"])
def test_an_uncounted_write_to_a_device_fails_the_snapshot_by_name(history, check):
    model, optimizer = make(1000)
    model.cuda()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, check=check, budget_bytes=40 * MIB)
    session.wait()
    one_step(model, optimizer)
    if check == "hash":
        model.inner.weight.data.view(-1)[77].neg_()
    else:
        model.inner.weight.data.mul_(0.5)
    # The barrier does not wait for the device; the verdict comes when it has compared.
    optimizer.step()
    with pytest.raises(SnapshotError, match=r"inner\.weight'.*written to"):
        session.wait()
    session.close()


def test_frozen_weights_are_written_three_times_and_then_referred_to(history):
    model, _ = make(1000)
    model.cuda()
    model.inner.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, budget_bytes=40 * MIB)
    expected = {}
    for step in range(1, 7):
        one_step(model, optimizer)
        session.wait()
        expected[step] = on_host(reference(model, optimizer))
    with session.modify():
        model.inner.weight.data.view(-1)[123_456].neg_()
    one_step(model, optimizer)
    expected[7] = on_host(reference(model, optimizer))
    session.close()
    assert session.stats.unchanged_bytes == 4 * 4 * 1000 * 1000
    for step, state in expected.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)


def test_moments_in_channels_last_order_and_a_restore_through_pinned_memory(history):
    torch.manual_seed(2)

    def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Conv2d(64, 256, 3), torch.nn.ReLU(), torch.nn.Conv2d(256, 64, 3))
        model.cuda().to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(2, 64, 12, 12, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = training()
    session = capture.enable(model, optimizer=optimizer, every=1, history=history, budget_bytes=40 * MIB)
    for _ in range(3):
        step(model, optimizer)
    expected = on_host(reference(model, optimizer))
    session.close()
    assert_same(capture.restore(f"{session.run}:3", history=history), expected)
    again, its_optimizer = training()
    step(again, its_optimizer)
    capture.restore(f"{session.run}:3", history=history, model=again, optimizer=its_optimizer)
    assert_same(on_host(reference(again, its_optimizer)), expected)
