"""The loss of a step is the mean of its micro-batches, whichever streams have computed them."""

import pytest
import torch
from late_marks import LateMarks

from capture.loops.step_metrics import Losses, StepMetrics


class LateClone(torch.Tensor):
    """A loss whose copy has its value only when the device gets to it."""

    marks: LateMarks
    value: float

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.clone:
            plain = torch.full((), float("nan"))
            args[0].marks.give(lambda: plain.fill_(args[0].value))
            return plain
        if func is torch.Tensor.detach:
            result.marks, result.value = args[0].marks, args[0].value
        return result


def late_loss(marks: LateMarks, value: float) -> torch.Tensor:
    loss = torch.full((), -1.0).as_subclass(LateClone)
    loss.marks, loss.value = marks, value
    return loss


def test_the_mean_is_taken_behind_every_loss():
    marks = LateMarks()
    losses = Losses(marks)
    for value in (1.0, 2.0, 6.0):
        losses.add(late_loss(marks, value))
    mean = losses.take_mean()
    assert mean is not None
    assert float(mean) == 3.0
    assert len(marks.kept_for_reading) >= 3
    assert losses.take_mean() is None


def test_a_loss_in_a_graph_that_is_captured_is_left_out():
    marks = LateMarks()
    metrics = StepMetrics(marks)
    marks.recording = True
    metrics.add_loss(torch.tensor(1.0))
    marks.recording = False
    metrics.add_loss(torch.tensor(5.0))
    assert float(metrics.take()["loss"]) == 5.0
    assert metrics.take().keys() == {"step_time_s"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_mean_is_taken_in_single_precision_or_better(dtype):
    losses = Losses()
    losses.add(torch.tensor([1.0], dtype=dtype))
    losses.add(torch.tensor([2.0], dtype=dtype))
    mean = losses.take_mean()
    assert mean is not None
    assert (float(mean), mean.dtype) == (1.5, torch.float64 if dtype == torch.float64 else torch.float32)
