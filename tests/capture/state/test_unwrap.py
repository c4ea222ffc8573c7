"""Names and objects come out without what frameworks wrap around them."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import capture
from capture.state.providers import Buffers, ModuleParameters
from capture.state.unwrap import logical_name, unwrapped, unwrapped_scheduler


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1), persistent=False)


def wrapped() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.compile(Counting(), backend="eager"), checkpoint_wrapper(Counting()), checkpoint_wrapper(Counting())
    )


@pytest.mark.parametrize(
    ("name", "logical"),
    [
        ("_orig_mod.a._checkpoint_wrapped_module.b", "a.b"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("module.weight", "module.weight"),
    ],
)
def test_only_whole_parts_of_a_name_are_left_out(name, logical):
    assert logical_name(name) == logical


def test_wrappers_inside_the_module_leave_no_trace_in_names():
    bare = torch.nn.Sequential(Counting(), Counting(), Counting())
    names = [item.name for item in ModuleParameters(wrapped()).tensors()]
    assert names == [name for name, _ in bare.named_parameters()]
    assert Buffers(wrapped()).objects() == Buffers(bare).objects() != {}


def test_wrappers_around_wrappers_are_taken_off():
    inner = Counting()
    assert unwrapped(torch.compile(torch.nn.DataParallel(inner), backend="eager")) is inner


def test_a_wrapping_scheduler_with_own_state_stays(tmp_path):
    class Warm:
        """This wrapper is not Accelerate's, so its state besides the inner scheduler must be stored too."""

        def __init__(self, scheduler):
            self.scheduler = scheduler

        def state_dict(self):
            return {"own": 7, "inner": self.scheduler.state_dict()}

        def load_state_dict(self, state):
            self.restored = state["own"]

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Warm(torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert unwrapped_scheduler(scheduler) is scheduler
    capture.enable(model, optimizer=optimizer, scheduler=scheduler, history=tmp_path / "history").close()
    capture.restore(0, history=tmp_path / "history", model=model, optimizer=optimizer, scheduler=scheduler)
    assert scheduler.restored == 7
