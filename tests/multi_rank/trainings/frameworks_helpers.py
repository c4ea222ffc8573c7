"""A tiny model that is hard to address, and copies of its whole state, for the tests of frameworks other than
DeepSpeed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_helpers import assert_same
from torch import nn

import capture

VOCABULARY, WIDTH, LENGTH = 29, 20, 9

Training = tuple[nn.Module, torch.optim.Optimizer, Any]
State = dict[str, dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 33)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(33, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tiny(nn.Module):
    """A model that is hard to address.

    It has rows that two ranks can't share evenly, a parameter with one row, a tied head, a frozen parameter, dropout,
    and buffers that forward changes, one of them not persistent. Its wide layers are large enough to be read from live
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(WIDTH, 30_001), nn.GELU(), nn.Linear(30_001, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1, 3))
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.float().mean()
        self.cache += 1
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain.sum() / 3 + self.cache.sum() * 1e-3)
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        return loss + self.wide(self.embed(tokens)).square().mean()


def with_optimizer(module: nn.Module) -> Training:
    """Add an optimizer with two parameter groups and a schedule that advances with every update."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def tiny(seed: int) -> Tiny:
    """Return a model that is equal on every rank; random numbers drawn afterwards differ between ranks."""
    torch.manual_seed(seed)
    model = Tiny()
    torch.manual_seed(100 * seed + rank())
    return model


def plain(seed: int) -> Training:
    return with_optimizer(tiny(seed))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch(index: int) -> torch.Tensor:
    """Return a batch that is a function of `index` and the rank alone."""
    generator = torch.Generator().manual_seed(1000 * index + rank())
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)


def train(
    training: Training, steps: int, *, start: int, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """Take `steps` updates after the first `start`; return their losses. `after` gets the number of each update."""
    model, optimizer, scheduler = training
    losses = []
    for index in range(start, start + steps):
        loss = model(batch(index))
        loss.backward()
        average_gradients(model)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(index + 1)
    return losses


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over all ranks, as DDP and FSDP do, so that all ranks take the same step.

    Averaging gradients that are already equal leaves them unchanged, bit for bit.
    """
    for parameter in model.parameters() if dist.is_initialized() else ():
        if parameter.grad is not None and not hasattr(parameter.grad, "full_tensor"):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return an eager copy of all state by kind and logical name, with shards combined, without any tested code."""
    state: State = {"model": {}, "buffer": {}}
    for raw, parameter in model.named_parameters():
        name = ".".join(part for part in raw.split(".") if part not in ("module", "_orig_mod"))
        state["model"][name] = _whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            state.setdefault(key, {})[name] = _whole(value)
    for raw, buffer in model.named_buffers():
        name = ".".join(part for part in raw.split(".") if part not in ("module", "_orig_mod"))
        state["buffer"][name] = buffer.clone()
    return state


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def enabled(training: Training, history: Path, **options: Any) -> capture.Session:
    model, optimizer, scheduler = training
    options = {"every": 1, "backend": "posix", "budget_bytes": 32 << 20, **options}
    return capture.enable(model, optimizer=optimizer, scheduler=scheduler, history=history, **options)


def all_closed() -> None:
    """Wait until every rank has closed its session, because a step is committed only when all ranks have written it."""
    if dist.is_initialized():
        dist.barrier()


def restored(training: Training, step: int, history: Path) -> Training:
    model, optimizer, scheduler = training
    all_closed()
    capture.restore(step, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
    return training


def goes_on_exactly(make: Callable[[int], Training], history: Path) -> None:
    """Capture a training at every step; assert that a restore of step 2 into another training continues it exactly."""
    first, states = make(1), {}

    def keep(step: int) -> None:
        states[step] = whole_state(first[0], first[1])

    with enabled(first, history) as session:
        losses = train(first, 5, start=0, after=keep)
        session.wait()
        assert session.stats.failed == 0
    other = restored(make(2), 2, history)
    assert_same(whole_state(other[0], other[1]), states[2])
    assert train(other, 3, start=2) == losses[2:]
    assert_same(whole_state(other[0], other[1]), states[5])


def crosses(make: Callable[[int], Training], history: Path) -> None:
    """Restore the history of `goes_on_exactly` into a plain module, capture that, and restore it back."""
    other = restored(make(3), 2, history)
    state = whole_state(other[0], other[1])
    losses = train(other, 2, start=2)
    bare = restored(plain(4), 2, history)
    assert_same(whole_state(bare[0], bare[1]), state)
    between = history.with_name(f"{history.name}-bare")
    enabled(bare, between).close()
    back = restored(make(5), 2, between)
    assert train(back, 2, start=2) == losses
    assert_same(whole_state(back[0], back[1]), whole_state(other[0], other[1]))
