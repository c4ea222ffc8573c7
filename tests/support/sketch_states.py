"""States of a small training whose updates are hard for sketches: a dominant column, a dominant row, few rows."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

COLUMN, ROW = 21, 5
TOKENS, WIDTH, UNITS = 2_000, 32, 64


@dataclass(frozen=True)
class State:
    """One tensor, flattened as float32, at the steps 0, 20 and 40 of the training."""

    name: str
    steps: tuple[np.ndarray, np.ndarray, np.ndarray]


class Model(nn.Module):
    """A model with one dominant input and output, whose column and row receive nearly all of the update."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.column = nn.Linear(WIDTH, UNITS)
        self.row = nn.Linear(UNITS, UNITS)
        self.spread = nn.Linear(UNITS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        offset = torch.zeros(WIDTH).index_fill(0, torch.tensor([COLUMN]), 10.0)
        hidden = self.column(self.tokens(tokens) + offset) / 10
        return self.row(hidden), self.spread(hidden)


@cache
def trained() -> dict[str, State]:
    """Return weights and momenta by name, from 40 steps of SGD with momentum."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    taken: dict[str, list[np.ndarray]] = {}
    for step in range(41):
        if step % 20 == 0:
            take(model, optimizer, taken)
        optimizer.zero_grad()
        rows, spread = model(torch.randint(0, 40, (16,)) * 7)
        weights = torch.ones(UNITS).index_fill(0, torch.tensor([ROW]), 20.0)
        loss = (weights * (rows - 1.0)).square().mean() + (spread - 1.0).square().mean()
        loss.backward()
        optimizer.step()
    return {name: State(name, (steps[0], steps[1], steps[2])) for name, steps in taken.items()}


def take(model: nn.Module, optimizer: torch.optim.Optimizer, taken: dict[str, list[np.ndarray]]) -> None:
    for name, weight in model.named_parameters():
        momentum = optimizer.state[weight].get("momentum_buffer", torch.zeros_like(weight))
        taken.setdefault(name, []).append(weight.detach().flatten().numpy().copy())
        taken.setdefault(f"{name} momentum", []).append(momentum.flatten().numpy().copy())


def share(update: np.ndarray, part: np.ndarray) -> float:
    """Return the share of `part` in the squared norm of the update."""
    return float(np.square(part, dtype=np.float64).sum() / np.square(update, dtype=np.float64).sum())
