"""A plan is kept while the state's tensors stay as they are, and made again for every way in which they can change."""

import copy
import dataclasses

import pytest
import torch
from capture_helpers import Net, assert_same, make, one_step, reference
from late_device import LateDevice

import capture
from capture.data_file.plan import Plan
from capture.snapshot.state_listing import StateListing
from capture.state.providers import Buffers, ModuleParameters, TorchOptimizer


def source_of(model: Net, optimizer: torch.optim.Optimizer) -> StateListing:
    providers = [ModuleParameters(model), Buffers(model), TorchOptimizer(optimizer, model)]
    return StateListing(providers, rank=0, world_size=1, align=4096)


class Counted:
    """Counts how often the tensors of a provider are looked at one by one, in Python."""

    looks = 0

    def tensors(self):
        self.looks += 1
        return super().tensors()

    def fingerprint(self):
        self.looks += 1
        return super().fingerprint()


class CountedParameters(Counted, ModuleParameters):
    """The parameters of a module."""


class CountedOptimizer(Counted, TorchOptimizer):
    """The state of an optimizer."""


class CountsInNumbers(torch.optim.SGD):
    """Keeps the number of its updates as a number, as many optimizers outside torch do: another object each time."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.counts = []

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 1000) + 1
                # Kept, so that no number takes the place of an earlier one in memory.
                self.counts.append(state["step"])
                state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.detach(), 0.1)


def plan_of(source: StateListing) -> Plan:
    return source.plan(source.read_objects())


def replace_data(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.inner.weight.data = model.inner.weight.data.clone()


def transpose_data(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.inner.weight.data = model.inner.weight.data.t()


def replace_parameter(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.extra = torch.nn.Parameter(torch.ones(3))


def tie(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.extra = model.inner.bias


def rename(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.inner._parameters["gain"] = model.inner._parameters.pop("weight")


def add_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.inner.add_module("deep", torch.nn.Linear(2, 2))


def rename_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.within = model.inner
    del model.inner


def move_module(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.outer.below = model.inner
    del model.inner


def swap_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[model.inner.weight]
    state["step"], state["exp_avg"] = 3, state["step"]


def replace_buffer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.norm.running_mean = model.norm.running_mean.clone()


def add_buffer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.norm.register_buffer("table", torch.ones(2))


def replace_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[model.inner.weight]
    state["exp_avg"] = state["exp_avg"].clone()


def add_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.inner.weight]["velocity"] = torch.ones(2)


def load_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def cast(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.bfloat16()


CHANGES = [
    replace_data,
    transpose_data,
    replace_parameter,
    tie,
    add_module,
    rename_module,
    move_module,
    swap_state,
    replace_buffer,
    add_buffer,
    replace_state,
    add_state,
    load_state,
    cast,
]


def names_and_addresses(plan: Plan) -> list[tuple]:
    return sorted(
        (
            part.key,
            part.item.tensor.data_ptr(),
            part.dtype,
            part.item.shape,
            part.item.tensor.stride(),
            part.item.aliases,
        )
        for part in plan.parts
    )


@pytest.mark.parametrize("move", CHANGES)
def test_every_change_gets_a_new_plan(move):
    model, optimizer = make()
    one_step(model, optimizer)
    source = source_of(model, optimizer)
    before = plan_of(source)
    assert plan_of(source) is before
    move(model, optimizer)
    after = plan_of(source)
    assert after is not before
    assert names_and_addresses(after) == names_and_addresses(plan_of(source_of(model, optimizer)))
    assert plan_of(source) is after


def test_a_renamed_parameter_gets_a_new_plan():
    model, _ = make()
    source = StateListing([ModuleParameters(model)], rank=0, world_size=1, align=4096)
    before = plan_of(source)
    rename(model, None)
    assert "model/inner.gain" in {part.key for part in plan_of(source).parts}
    assert "model/inner.gain" not in {part.key for part in before.parts}


def test_an_unchanged_state_is_listed_once(monkeypatch):
    model, optimizer = make()
    one_step(model, optimizer)
    listed = []
    for kind in (ModuleParameters, Buffers, TorchOptimizer):
        original = kind.tensors
        monkeypatch.setattr(
            kind, "tensors", lambda self, original=original: listed.append(type(self)) or original(self)
        )
    source = source_of(model, optimizer)
    for _ in range(3):
        plan_of(source)
        one_step(model, optimizer)
    assert sorted(kind.__name__ for kind in listed) == ["Buffers", "ModuleParameters", "TorchOptimizer"]


class Listing:
    """This provider of a user has no `layout`."""

    def __init__(self) -> None:
        self.tensor = torch.arange(4.0)

    def tensors(self):
        return [capture.TensorItem("average", "user", (4,), self.tensor, when="eager")]

    def objects(self):
        return {}

    def prepare(self, available) -> None: ...

    def finish(self, available) -> None: ...


def test_a_provider_without_a_layout_is_listed_every_time(history):
    model, optimizer = make()
    mine = Listing()
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=[mine]) as session:
        one_step(model, optimizer)
        session.wait()
        mine.tensor = torch.arange(4.0) + 10
        one_step(model, optimizer)
        expected = {**reference(model, optimizer), "user": {"average": mine.tensor.clone()}}
    assert_same(capture.restore(2, history=history), expected)


class Growing:
    """This user state gains one tensor at every step and outgrows what a header has space for."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def state_dict(self) -> dict:
        return {"held": list(self.held)}

    def load_state_dict(self, state: dict) -> None:
        self.held = state["held"]


@pytest.mark.parametrize("grow", ["before the update", "before the next forward"])
def test_objects_may_outgrow_the_header(history, grow):
    """Objects known at the step get another plan; tensors that come once the header's length is fixed go into JSON."""
    model, optimizer = make()
    mine = Growing()
    providers = [capture.Stateful("mine", mine)]
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers) as session:
        for step in range(1, 4):
            more = [torch.full((2,), float(step)) for _ in range(200)]
            if grow == "before the update":
                optimizer.register_step_pre_hook(lambda *_, more=more: mine.held.extend(more) or more.clear())
            one_step(model, optimizer)
            mine.held += more
    for step in range(1, 4):
        capture.restore(f"{session.run}:{step}", history=history, model=model, optimizer=optimizer, providers=providers)
        assert [int(tensor[0]) for tensor in mine.held] == [n for n in range(1, step + 1) for _ in range(200)]


def test_after_a_load_memory_that_nobody_looks_at_is_not_taken_for_the_steps():
    """A device looks at a sample itself; with check="versions" nobody does, and a write to `.data` is not counted."""
    model, optimizer = make()
    providers = [ModuleParameters(model), Buffers(model), TorchOptimizer(optimizer, model)]
    listing = StateListing(providers, rank=0, world_size=1, align=4096, copies=LateDevice())
    sampled, counted = listing.keep(1, check="sampled"), listing.keep(1, check="versions")
    model.inner.weight.data.zero_()
    assert listing.changed(sampled) == ["model 'inner.weight'"]
    assert listing.changed(counted) == []
    assert "model 'inner.weight'" in listing.changed(dataclasses.replace(counted, accessed=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsInNumbers])
def test_steps_that_are_not_captured_list_nothing_anew(kind):
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    parameters, state = CountedParameters(model), CountedOptimizer(optimizer, model)
    listing = StateListing([parameters, state], rank=0, world_size=1, align=4096)
    one_step(model, optimizer)
    listing.keep(0, check="sampled")
    # Another dict with the same tensors lists nothing anew, and is as good as the one before.
    first = next(iter(optimizer.state))
    optimizer.state[first] = dict(optimizer.state[first])
    watched = listing.keep(1, check="sampled").weights.items
    before = parameters.looks, state.looks
    for step in range(2, 6):
        one_step(model, optimizer)
        kept = listing.keep(step, check="sampled")
        assert kept.weights.items is watched
        assert listing.changed(kept) == []
    assert (parameters.looks, state.looks) == before
