"""The trainings of which every step is kept: a GPT in fp32, in mixed precision under DeepSpeed, or wholly in bf16."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

import capture
from benchmarks.peers_grouped import group_of_one
from benchmarks.training_state import Training, filled, gpt

__all__ = ["KeptTraining", "kept_trainings"]

_CLIPPED_NORM = 0.1
"""The gradients are always larger, so that what the update reads is never a bf16 number."""


class KeptTraining(Protocol):
    """A training that goes on from one contender to the next."""

    def step(self, tokens: torch.Tensor) -> None:
        """Train on int64 tokens [batch, 1 + length]."""

    def enable(self, root: Path, **options: Any) -> capture.Session:
        """Capture it from now on."""

    def state_bytes(self) -> int:
        """Return the bytes of its weights and moments; in mixed precision of the masters, not the weights."""

    def close(self) -> None:
        """Let go of what is not memory."""


def kept_trainings(state_bytes: int, precisions: Iterable[str]) -> dict[str, KeptTraining]:
    """Return one training for each precision, each of as many parameters as have `state_bytes` in fp32."""
    makers: dict[str, Callable[[], KeptTraining]] = {
        "fp32": lambda: _Plain(state_bytes, torch.float32),
        "mixed": lambda: _Mixed(state_bytes, clipping=0.0),
        "mixed clipped": lambda: _Mixed(state_bytes, clipping=_CLIPPED_NORM),
        "bf16": lambda: _Plain(state_bytes, torch.bfloat16),
    }
    return {precision: makers[precision]() for precision in dict.fromkeys(precisions)}


class _Plain:
    def __init__(self, state_bytes: int, dtype: torch.dtype) -> None:
        model = filled(gpt(state_bytes)).model.to(dtype)
        self._training = Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

    def step(self, tokens: torch.Tensor) -> None:
        self._training.optimizer.zero_grad()
        self._training.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self._training.update()

    def enable(self, root: Path, **options: Any) -> capture.Session:
        return capture.enable(self._training.model, optimizer=self._training.optimizer, history=root, **options)

    def state_bytes(self) -> int:
        return self._training.state_bytes()

    def close(self) -> None:
        """It has memory only."""


class _Mixed:
    """A DeepSpeed engine of ZeRO 1: weights and gradients in bf16, masters and moments of torch's AdamW in fp32.
    `clipping`: the norm to which gradients are scaled; 0 for none.
    """

    def __init__(self, state_bytes: int, *, clipping: float) -> None:
        import deepspeed

        group_of_one()
        model = gpt(state_bytes)
        self._numel = sum(parameter.numel() for parameter in model.parameters())
        settings = {
            "train_batch_size": 1,
            "gradient_clipping": clipping,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        }
        self._engine = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings, dist_init_required=False
        )[0]

    def step(self, tokens: torch.Tensor) -> None:
        self._engine.backward(self._engine(tokens[:, :-1], tokens[:, 1:]))
        self._engine.step()

    def enable(self, root: Path, **options: Any) -> capture.Session:
        return capture.enable(self._engine, history=root, **options)

    def state_bytes(self) -> int:
        return 3 * 4 * self._numel

    def close(self) -> None:
        self._engine.destroy()
