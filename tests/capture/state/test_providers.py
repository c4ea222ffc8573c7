"""The shared State Providers list the whole state and put back what they list."""

import random

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from capture.state.dtypes import dtype_name
from capture.state.interface import Available
from capture.state.objects import decode_object, encode_object
from capture.state.providers import Buffers, DataloaderPosition, ModuleParameters, RandomState, Stateful, TorchOptimizer
from catalog.errors import MismatchError, UnsupportedError


class Tied(torch.nn.Module):
    """The module has tied, frozen, 0-dim and zero-size parameters, and persistent and non-persistent buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x)) * self.scale


def available(*providers, drop: tuple[str, ...] = ()) -> Available:
    """Return what a checkpoint of `providers` offers, with objects taken through their stored form."""
    tensors = {
        (item.kind, item.name): (item.shape, dtype_name(item.tensor.dtype, what=item.name))
        for provider in providers
        for item in provider.tensors()
        if item.name not in drop
    }
    objects = {}
    for provider in providers:
        for name, (value, _) in provider.objects().items():
            encoded = encode_object(name, value)
            objects[name] = decode_object(name, encoded.json, tensor=encoded.tensors.__getitem__)
    return Available(tensors, objects)


def copied(*providers) -> dict[tuple[str, str], torch.Tensor]:
    return {(item.kind, item.name): item.tensor.clone() for provider in providers for item in provider.tensors()}


def put_back(providers, offered: Available, values: dict[tuple[str, str], torch.Tensor]) -> None:
    """Restore without a file."""
    for provider in providers:
        provider.prepare(offered)
    for provider in providers:
        for item in provider.tensors():
            item.tensor.copy_(values[item.kind, item.name])
    for provider in providers:
        provider.finish(offered)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randint(7, (5,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_parameter_once_under_its_first_name():
    items = {item.name: item for item in ModuleParameters(Tied()).tensors()}
    assert sorted(items) == ["embedding.weight", "frozen", "nothing", "scale"]
    assert items["embedding.weight"].aliases == ("head.weight",)
    assert items["scale"].shape == ()
    assert items["nothing"].shape == (0, 3)


def test_parameters_are_references_and_buffers_are_copied_at_once():
    model = Tied()
    for item in ModuleParameters(model).tensors():
        assert item.tensor.data_ptr() == model.get_parameter(item.name).data_ptr()
        assert item.when == "lazy"
    buffers = Buffers(model).tensors()
    assert {item.name for item in buffers} == {"running", "cache"}
    assert all(item.when == "eager" and item.placement == "rank_local" for item in buffers)


def test_names_come_from_the_module_inside_its_wrapper():
    model = Tied()
    names = {item.name for item in ModuleParameters(torch.nn.DataParallel(model)).tensors()}
    assert names == {item.name for item in ModuleParameters(model).tensors()}


def test_a_parameter_of_another_class_is_refused_by_name():
    model = torch.nn.Module()
    model.odd = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="'odd'"):
        ModuleParameters(model).tensors()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Rprop(p, lr=0.1),
    ],
    ids=["AdamW", "AdamW-tensor-lr", "SGD-momentum", "SGD", "Adafactor", "Adagrad", "Rprop"],
)
def test_an_optimizer_comes_back_in_a_fresh_process(make):
    torch.manual_seed(1)
    model = Tied()
    optimizer = make([p for p in model.parameters() if p.requires_grad and p.numel()])
    trained(model, optimizer, 3)
    optimizer.param_groups[0]["weight_decay"] = 0.123
    providers = [ModuleParameters(model), TorchOptimizer(optimizer, model)]
    offered, values = available(*providers), copied(*providers)

    other = Tied()
    fresh = make([p for p in other.parameters() if p.requires_grad and p.numel()])
    put_back([ModuleParameters(other), TorchOptimizer(fresh, other)], offered, values)
    for state in (torch.get_rng_state(),):
        trained(model, optimizer, 3)
        torch.set_rng_state(state)
        trained(other, fresh, 3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert fresh.param_groups[0]["weight_decay"] == 0.123


def test_state_that_the_checkpoint_does_not_have_is_dropped():
    model = Tied()
    optimizer = torch.optim.AdamW([model.scale, model.embedding.weight])
    providers = [TorchOptimizer(optimizer, model)]
    offered = available(*providers)
    trained(model, optimizer, 2)
    put_back(providers, offered, {})
    assert not optimizer.state


def test_a_refused_restore_leaves_the_optimizer_as_it_was():
    model = Tied()
    optimizer = torch.optim.AdamW([model.scale, model.embedding.weight])
    trained(model, optimizer, 1)
    offered = available(TorchOptimizer(optimizer, model))
    fresh = torch.optim.AdamW([model.scale, model.embedding.weight])
    TorchOptimizer(fresh, model).prepare(offered)
    assert not fresh.state
    trained(model, fresh, 1)


def test_other_param_groups_are_refused_with_both_sides():
    model = Tied()
    offered = available(TorchOptimizer(torch.optim.AdamW([model.scale]), model))
    with pytest.raises(MismatchError, match=r"embedding\.weight"):
        TorchOptimizer(torch.optim.AdamW([model.embedding.weight]), model).prepare(offered)
    two = torch.optim.AdamW([{"params": [model.scale]}, {"params": [model.embedding.weight]}])
    with pytest.raises(MismatchError, match="1 optimizer param groups"):
        TorchOptimizer(two, model).prepare(offered)


def test_a_parameter_outside_the_module_is_refused():
    model = Tied()
    optimizer = torch.optim.SGD([model.scale, torch.nn.Parameter(torch.ones(5))])
    with pytest.raises(UnsupportedError, match=r"shape \(5,\)"):
        list(TorchOptimizer(optimizer, model).tensors())


def test_a_non_persistent_buffer_may_be_missing_and_a_persistent_one_may_not():
    offered = available(Buffers(Tied()), drop=("cache",))
    provider = Buffers(Tied())
    provider.prepare(offered)
    assert [item.name for item in provider.tensors()] == ["running"]
    provider.finish(offered)
    assert {item.name for item in provider.tensors()} == {"running", "cache"}


def test_all_generators_come_back():
    provider = RandomState()
    offered = available(provider)

    def draw() -> tuple:
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    first = draw()
    assert draw() != first
    provider.finish(offered)
    assert draw() == first


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 5, 7])
def test_a_dataloader_goes_on_and_the_generators_with_it(taken, workers):
    """The restore crosses the end of an epoch of five batches and shuffles from the global generator."""

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(list(range(10)), batch_size=2, shuffle=True, num_workers=workers)

    def batches(source):
        while True:
            for batch in source:
                yield (*batch.tolist(), float(torch.rand(())))

    torch.manual_seed(3)
    original = loader()
    running = batches(original)
    for _ in range(taken):
        next(running)
    offered = available(DataloaderPosition(original), RandomState())
    expected = [next(running) for _ in range(12)]

    torch.manual_seed(99)
    resumed = loader()
    for provider in (DataloaderPosition(resumed), RandomState()):
        provider.finish(offered)
    going_on = batches(resumed)
    assert [next(going_on) for _ in range(12)] == expected


def test_asking_a_dataloader_for_its_position_changes_no_batch_and_no_draw():
    """Asking makes an iterator, and the training then uses that iterator."""

    def run(asking: bool) -> tuple:
        torch.manual_seed(4)
        loader = StatefulDataLoader(list(range(10)), batch_size=2, shuffle=True)
        position = DataloaderPosition(loader)
        batches = []
        for _ in range(2):
            if asking:
                position.objects()
            for batch in loader:
                batches.append(batch.tolist())
                if asking:
                    position.objects()
        return batches, torch.get_rng_state().tolist()

    assert run(True) == run(False)


def test_a_dataloader_without_a_position_is_refused():
    with pytest.raises(UnsupportedError, match="StatefulDataLoader"):
        DataloaderPosition(torch.utils.data.DataLoader([1, 2]))


def test_user_state_is_restored_in_place():
    state = {"epoch": 3, "seen": [1, 2]}
    provider = Stateful("user", state)
    offered = available(provider)
    state["epoch"] = 4
    del state["seen"]
    provider.finish(offered)
    assert state == {"epoch": 3, "seen": [1, 2]}


def test_an_object_without_state_is_refused():
    with pytest.raises(UnsupportedError, match="user"):
        Stateful("user", object())
