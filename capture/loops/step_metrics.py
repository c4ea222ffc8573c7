"""The metrics that a loop records of each step: time and loss. Never waits for the device."""

import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from capture.devices.marks import CUDA_MARKS, Mark, Marks, behind

__all__ = ["Losses", "StepMetrics", "loss_in"]


class Losses:
    """The losses of the micro-batches of one step; each is copied, not read, on the stream where it is computed."""

    def __init__(self, marks: Marks = CUDA_MARKS) -> None:
        self._marks = marks
        self._kept: list[torch.Tensor] = []
        self._behind: list[Mark] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, a tensor of one element. One in a CUDA graph that is being captured has no value, and is left
        out.
        """
        if self._marks.owns(loss) and self._marks.is_recording():
            return
        # The mean of several half-precision losses is taken in single precision.
        kept = loss.detach().clone().reshape(())
        self._kept.append(kept if kept.dtype == torch.float64 else kept.float())
        self._behind += behind([loss], self._marks)

    def take_mean(self) -> torch.Tensor | None:
        """Return the mean of what was added since the last call, None if nothing was."""
        kept, marks = self._kept, self._behind
        self._kept, self._behind = [], []
        if not kept:
            return None
        for mark in marks:
            mark.precede(kept)
        return torch.stack(kept).mean()


class StepMetrics:
    """Collects the losses of a step, and measures the time from one `take` to the next."""

    def __init__(self, marks: Marks = CUDA_MARKS) -> None:
        self._began = time.perf_counter()
        self._losses = Losses(marks)

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of one micro-batch, a tensor of one element; it is copied, not read."""
        self._losses.add(loss)

    def take(self) -> dict[str, float | torch.Tensor]:
        """Return `step_time_s`, and `loss`, the mean over the micro-batches, if one was added; begin the next step."""
        now = time.perf_counter()
        metrics: dict[str, float | torch.Tensor] = {"step_time_s": now - self._began}
        loss = self._losses.take_mean()
        if loss is not None:
            metrics["loss"] = loss
        self._began = now
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
