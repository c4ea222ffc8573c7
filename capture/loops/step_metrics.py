"""The metrics that a loop records of each step: time and loss. Never waits for the device."""

import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["StepMetrics", "loss_in"]


class StepMetrics:
    """Collects the losses of a step, and measures the time from one `take` to the next."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._losses: list[torch.Tensor] = []

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of one micro-batch, a tensor of one element; it is copied, not read."""
        # The mean of several half-precision losses is taken in single precision.
        kept = loss.detach().clone().reshape(())
        self._losses.append(kept if kept.dtype == torch.float64 else kept.float())

    @property
    def has_loss(self) -> bool:
        """True when a loss was added since the last `take`."""
        return bool(self._losses)

    def take(self) -> dict[str, float | torch.Tensor]:
        """Return `step_time_s`, and `loss`, the mean over the micro-batches, if one was added; begin the next step."""
        now = time.perf_counter()
        metrics: dict[str, float | torch.Tensor] = {"step_time_s": now - self._began}
        if self._losses:
            metrics["loss"] = torch.stack(self._losses).mean()
        self._began, self._losses = now, []
        return metrics


def loss_in(output: Any) -> torch.Tensor | None:
    """Return the loss in a forward's output: a 0-dim tensor that can be differentiated, or the `.loss` of an output
    that has one. None where there is none: a prediction of one element is no loss.
    """
    loss = output if isinstance(output, torch.Tensor) and output.dim() == 0 else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad and _has_a_value(loss):
        return loss
    return None


def _has_a_value(loss: torch.Tensor) -> bool:
    """Return whether `loss` is one real number, not a stand-in while torch transforms or traces a function."""
    traced = loss.is_meta or isinstance(loss, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(loss)
    return loss.is_floating_point() and not traced
