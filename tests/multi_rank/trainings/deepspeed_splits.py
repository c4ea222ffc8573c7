"""Engines whose ranks hold different parameters: experts, and the stages of a pipeline."""

import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_helpers import VOCABULARY, WIDTH, Block, TinyGPT, batches, config, make_engine, two_groups
from torch import nn


class WithExperts(TinyGPT):
    def __init__(self, *, ep_size: int) -> None:
        super().__init__()
        expert = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=1, use_rts=False)
        for index, one in enumerate(self.experts.deepspeed_moe.experts.deepspeed_experts):
            nn.init.normal_(one.weight, mean=float(index), std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        mixed, balance, _ = self.experts(self.embed(tokens))
        return loss + mixed.float().square().mean() + 0.01 * balance


def make_experts(*, ep_size: int, **settings: Any) -> Any:
    return make_engine(model=lambda: WithExperts(ep_size=ep_size), groups=False, **settings)


def head(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t()


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def make_pipeline(*, stages: int, seed: int = 7, **settings: Any) -> Any:
    torch.manual_seed(seed)
    layers = [
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Block),
        LayerSpec(Block),
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head),
    ]
    model = PipelineModule(layers=layers, num_stages=stages, loss_fn=next_token_loss, partition_method="uniform")
    made = config(accumulation=2, world=int(os.environ["WORLD_SIZE"]) // stages, **settings)
    return deepspeed.initialize(model=model, model_parameters=two_groups(model), config=made)[0]


def pairs(start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tokens in batches(0, start=start):
        yield tokens, tokens


def train_pipeline(engine: Any, steps: int) -> list[float]:
    stream = pairs(2 * engine.global_steps)
    return [float(engine.train_batch(stream)) for _ in range(steps)]
