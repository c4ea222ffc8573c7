"""A small training, eager reference copies of its state, and sessions whose writer is slow or fails on purpose."""

from pathlib import Path
from typing import Any

import torch
from faulty_writer import faults_in_new_writers

import capture
from catalog.history import History
from native import Faults

MIB = 1 << 20


class Net(torch.nn.Module):
    """A model with linear layers of `width`, batch statistics that every forward changes, and dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.1)
        self.outer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.drop(torch.relu(self.norm(self.inner(x)))))


def make(width: int = 64, *, seed: int = 5) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    width = next(model.parameters()).shape[-1]
    loss = model(torch.randn(8, width)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def reference(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return an eager copy of all state by kind and name, made without any tested code."""
    state: dict[str, dict[str, torch.Tensor]] = {"model": {}, "buffer": {}}
    for name, parameter in model.named_parameters():
        state["model"][name] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            state.setdefault(key, {})[name] = value.clone()
    for name, buffer in model.named_buffers():
        state["buffer"][name] = buffer.clone()
    return state


def assert_same(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> None:
    """Assert that both states are equal in names, shapes, dtypes and every bit."""
    assert a.keys() == b.keys()
    for kind, tensors in a.items():
        assert tensors.keys() == b[kind].keys()
        for name, tensor in tensors.items():
            other = b[kind][name]
            assert tensor.dtype == other.dtype, (kind, name)
            assert tensor.shape == other.shape, (kind, name)
            assert bits(tensor) == bits(other), f"{kind} {name} is torn"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def faulty_session(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    root: Path,
    *,
    faults: Faults | None,
    **options: Any,
) -> capture.Session:
    """Return a session that captures every step with a writer that has `faults`."""
    options = {"every": 1, "backend": "posix", "budget_bytes": 32 * MIB, **options}
    with faults_in_new_writers(faults):
        return capture.enable(model, optimizer=optimizer, history=root, **options)


def committed_steps(root: Path, run: str) -> list[int]:
    return [ref.step for ref in History.open(root).checkpoints(run)]
