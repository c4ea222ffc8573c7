"""Cases for what people train with: their own optimizers, adapters, norms with buffers, recomputation, compiled modules.

Each is captured, restored into a fresh engine and again into the live one, and trains on to the same bits.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed_cases_original import state_of
from deepspeed_eager import assert_same
from deepspeed_helpers import WIDTH, TinyGPT, config, make_engine, train, two_groups
from deepspeed_ranks import covers
from torch import nn

import capture

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
CAPTURED, LAST = 3, 6


def check_capture(history: Path, make: Callable[[int], Any]) -> None:
    """`make` builds an engine from a seed."""
    engine = make(7)
    torch.manual_seed(11 + RANK)
    with capture.enable(engine, every=CAPTURED, history=history) as session:
        train(engine, CAPTURED)
        middle = state_of(engine)
        losses = train(engine, LAST - CAPTURED)
        last = state_of(engine)
    assert session.stats.failed == 0
    engine.destroy()
    torch.distributed.barrier()
    again = make(99)
    for _ in range(2):
        capture.restore(CAPTURED, history=history, engine=again)
        assert_same(state_of(again), middle)
        assert train(again, LAST - CAPTURED) == losses, history.name
        assert_same(state_of(again), last)
    again.destroy()


class Own(torch.optim.Optimizer):
    """A user's optimizer: the sign of a momentum, with a count of its own."""

    def __init__(self, params: Iterable[Any], *, lr: float = 1e-3, memory: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "memory": memory})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(updates=0, trend=torch.zeros_like(parameter))
                state["updates"] += 1
                state["trend"].lerp_(parameter.grad.to(parameter.dtype), 1 - group["memory"])
                parameter.sub_(state["trend"].sign(), alpha=group["lr"] / state["updates"] ** 0.5)


def with_client(optimizer: Callable[[Any], torch.optim.Optimizer], seed: int, **settings: Any) -> Any:
    """An engine around an optimizer that the user has made."""
    torch.manual_seed(seed)
    model = TinyGPT()
    made = config(world=WORLD, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, **settings)
    del made["optimizer"]
    return deepspeed.initialize(model=model, optimizer=optimizer(two_groups(model)), config=made)[0]


@covers("a user's own optimizer: ZeRO 0, 1, 2, 3")
def case_a_users_own_optimizer(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        check_capture(folder / f"own-{stage}", lambda seed, stage=stage: with_client(Own, seed, stage=stage))


@covers("torch Adam and AdamW that the user has made: ZeRO 2, 3")
def case_torch_optimizers_of_the_user(folder: Path) -> None:
    for stage, rule in ((2, torch.optim.Adam), (3, torch.optim.AdamW)):
        check_capture(folder / f"adam-{stage}", lambda seed, s=stage, r=rule: with_client(r, seed, stage=s))


@covers("DeepSpeed CPU Adam without offload: ZeRO 1, 2")
def case_cpu_adam_without_offload(folder: Path) -> None:
    for stage in (1, 2):
        check_capture(folder / f"cpu-{stage}", lambda seed, s=stage: with_client(DeepSpeedCPUAdam, seed, stage=s))


@covers("SGD with momentum: ZeRO 0, 1")
def case_sgd_with_momentum(folder: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    for stage in (0, 1):
        settings = {"stage": stage, "optimizer": sgd, "zero_allow_untested_optimizer": True}
        check_capture(folder / f"sgd-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))


class WithAdapters(TinyGPT):
    """Everything frozen but a low-rank path beside."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        x = self.embed(tokens)
        return loss + (self.up(self.down(x)) - x).float().square().mean()


@covers("LoRA-like, most parameters frozen: ZeRO 0, 1, 2, 3")
def case_most_parameters_frozen(folder: Path) -> None:
    for stage in (0, 1, 2, 3):
        settings: dict[str, Any] = {"model": WithAdapters, "groups": False, "stage": stage}
        check_capture(folder / f"lora-{stage}", lambda seed, s=settings: make_engine(seed=seed, **s))
