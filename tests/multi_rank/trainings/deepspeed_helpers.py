"""Tiny models, engines of every kind and a deterministic stream of batches for the DeepSpeed tests."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

VOCABULARY, WIDTH, LENGTH = 29, 20, 9
FP16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 3, "hysteresis": 1}
CPU_ADAM = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1}}
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """A GPT that is hard to address: odd sizes, a tied head, a frozen parameter, a buffer that forward changes,
    dropout.
    """

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.float().mean()
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain.sum() / 3)
        return nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


class WideGPT(TinyGPT):
    """A GPT with partitions of several MiB, which the writer takes from live memory without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(WIDTH, 25_000), nn.GELU(), nn.Linear(25_000, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss + self.wide(self.embed(tokens)).square().mean()


def batches(rank: int, *, start: int = 0) -> Iterator[torch.Tensor]:
    """Yield micro-batches; batch i of a rank is a function of i and the rank alone."""
    index = start
    while True:
        yield torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1000 * index + rank))
        index += 1


def config(*, stage: int, dtype: str = "bf16", accumulation: int = 1, world: int = 1, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration; `zero` in `more` extends its zero_optimization section."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 30, **more.pop("zero", {})}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": 2 * accumulation * world,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 5e-3}},
        "zero_optimization": zero,
        "steps_per_print": None,
    }
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    return {**made, **more}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups with weight decay for matrices only, as in most trainings of transformers."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def allow_fp16() -> None:
    """Make DeepSpeed's CPU accelerator accept fp16, which torch supports."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]


def make_engine(
    *, seed: int = 7, model: Callable[[], nn.Module] = TinyGPT, groups: bool = True, **settings: Any
) -> Any:
    """Return a fresh engine with a fresh model; all its random numbers follow from `seed`."""
    torch.manual_seed(seed)
    module = model()
    settings.setdefault("world", int(os.environ["WORLD_SIZE"]))
    parameters = two_groups(module) if groups else [p for p in module.parameters() if p.requires_grad]
    return deepspeed.initialize(model=module, model_parameters=parameters, config=config(**settings))[0]


def with_client(optimizer: Callable[[Any], torch.optim.Optimizer], seed: int, **settings: Any) -> Any:
    """Return an engine around an optimizer that the user created."""
    torch.manual_seed(seed)
    model = TinyGPT()
    world = int(os.environ["WORLD_SIZE"])
    made = config(world=world, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, **settings)
    del made["optimizer"]
    return deepspeed.initialize(model=model, optimizer=optimizer(two_groups(model)), config=made)[0]


def train(engine: Any, steps: int, *, start: int | None = None) -> list[float]:
    """Train until `steps` more updates were taken; return the loss of every micro-batch.

    The batches follow from the counter of the engine unless `start` is given.
    """
    stream = batches(int(os.environ["RANK"]), start=engine.micro_steps if start is None else start)
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(next(stream))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
