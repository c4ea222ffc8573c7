"""States of three small trainings, some steps apart, as raw bytes: what `packing` packs.

A GPT on the project's own source text, wholly in bfloat16 with float32 masters and AdamW: from scratch at a learning
rate of 1e-3; fine-tuned from there on other text at 1e-5; and with adapters of rank 8 in float32 beside its frozen
layers, at 1e-4.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from examples.gpt.model import GPT, GPTConfig

__all__ = ["DISTANCES", "Kept", "trainings"]

ROOT = Path(__file__).parent.parent

DISTANCES = (1, 10, 50)

State = dict[str, list[tuple[int, bytes]]]
"""The tensors of each kind: the bytes of an element, and those of all."""


@dataclass(frozen=True)
class Kept:
    """A training: its parameters, frozen ones too, and its state at a step and at each distance from it."""

    name: str
    parameters: int
    at: dict[int, State]


class _Adapted(nn.Module):
    """A frozen linear layer and what an adapter of a small rank adds to it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + ((x.float() @ self.down.T) @ self.up.T).to(x.dtype)


def trainings(*, layers: int, width: int, steps: int) -> Iterator[Kept]:
    """Yield the three trainings; `steps` come before the first state of each."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=layers, width=width, heads=width // 64)).bfloat16()
    count = sum(parameter.numel() for parameter in model.parameters())
    yield Kept("from scratch", count, _with_masters(model, 1e-3, "catalog", steps))
    yield Kept("fine-tune", count, _with_masters(model, 1e-5, "dshistory", steps))
    adapters = _adapt(model)
    yield Kept("LoRA", count, _train(model, adapters, torch.optim.AdamW(adapters, lr=1e-4), "dshistory", steps))


def _with_masters(model: nn.Module, rate: float, text: str, steps: int) -> dict[int, State]:
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.1, betas=(0.9, 0.95))

    def before_update() -> None:
        for master, weight in zip(masters, weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)

    def after_update() -> None:
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)

    return _train(model, masters, optimizer, text, steps, before_update, after_update, weights)


def _adapt(model: nn.Module) -> list[nn.Parameter]:
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and name != "head":
                setattr(parent, name, _Adapted(layer))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _train(
    model: nn.Module,
    trained: list[torch.Tensor],
    optimizer: torch.optim.AdamW,
    text: str,
    steps: int,
    before_update: Callable[[], None] = lambda: None,
    after_update: Callable[[], None] = lambda: None,
    weights: list[torch.Tensor] | None = None,
) -> dict[int, State]:
    batches = _batches(text)
    kept: dict[int, State] = {}
    for step in range(1, steps + max(DISTANCES) + 1):
        model(*next(batches)).backward()
        before_update()
        optimizer.step()
        after_update()
        optimizer.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
        if step - steps in (0, *DISTANCES):
            kept[step - steps] = _state(trained, optimizer, weights)
    return kept


def _state(trained: list[torch.Tensor], optimizer: torch.optim.AdamW, weights: list[torch.Tensor] | None) -> State:
    moments = {key: [optimizer.state[one][key] for one in trained] for key in ("exp_avg", "exp_avg_sq")}
    found = {"weights": weights or trained, **({"masters": trained} if weights else {}), **moments}
    return {kind: [(tensor.element_size(), _bytes(tensor)) for tensor in tensors] for kind, tensors in found.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _batches(text: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    content = b"".join(path.read_bytes() for path in sorted((ROOT / text).rglob("*.py")))
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    while True:
        places = torch.randint(0, len(data) - 129, (4,)).tolist()
        rows = torch.stack([data[at : at + 129] for at in places])
        yield rows[:, :-1], rows[:, 1:]
