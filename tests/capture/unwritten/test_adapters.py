"""A fine-tune with adapters costs about a hundredth of its state a checkpoint, on the host and on a device.

The base is frozen: a few large matrices, and norms and biases by the hundred. Only bytes are counted, of all files that
a checkpoint adds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from capture_helpers import MIB, assert_same, reference
from late_device import LateDevice, session_on, small_writer

import capture
from capture.session.session import Session
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.verify import verify

WIDTH, LAYERS, RANK = 512, 16, 1
STEPS = 4


class Adapted(torch.nn.Module):
    """A frozen layer with a norm and a bias, and a trained adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.base = torch.nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(self.norm(x)) + self.up(self.down(x))


Begin = Callable[[torch.nn.Module, torch.optim.Optimizer, Path], Session]


def on_host(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Session:
    return capture.enable(model, optimizer=optimizer, history=root, every=1, stats_every=0)


def on_device(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Session:
    device = LateDevice()
    device.gate.set()
    writer = small_writer(budget_bytes=4 * MIB)
    return session_on(device, model, optimizer, root, writer=writer, stats_every=0)


@pytest.mark.parametrize("begin", [on_host, on_device])
def test_a_fine_tune_with_adapters_costs_a_hundredth_from_the_second_checkpoint_on(history, begin: Begin, figure):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    session = begin(model, optimizer, history)
    session.wait()
    states = {}
    for _ in range(STEPS):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.wait()
        state = reference(model, optimizer)
        states[session.snapshot()] = {kind: tensors for kind, tensors in state.items() if tensors}
    session.close()
    assert not session.failures

    paths = History.open(history).paths
    folders = {step: paths.step_dir(session.run, step) for step in (0, *states)}
    sizes = {step: sum(file.stat().st_size for file in folder.iterdir()) for step, folder in folders.items()}
    ratio = max(sizes[step] for step in states) / sizes[0]
    figure("share of the first checkpoint", ratio)
    needed = 3 * 4 * sum(parameter.numel() for parameter in trained) / sizes[0]
    assert ratio < needed + 0.005, f"{sizes}: adapters and their moments alone are {needed:.4f}"

    assert verify(History.open(history)) == []
    for step, state in states.items():
        assert_same(capture.restore(f"{session.run}:{step}", history=history), state)
        written = [
            one for one in History.open(history).extents(CheckpointRef(session.run, step)) if one.kind == "model"
        ]
        frozen = {one.name for one in written if f"{0:012}" in one.file}
        assert frozen == {n for n, p in model.named_parameters() if not p.requires_grad}
