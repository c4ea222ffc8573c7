"""A large tensor is updated piece by piece where that gives the bits of the whole, and at once where it does not."""

import pytest
import torch

from capture.redo import pieces
from capture.redo.pieces import Pieces

ELEMENTS = 10_007
SAME = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW, maximized": (torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", 1000)


def numbers(count, *, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def trained(kind, options, *, dtype=torch.float32, steps=3, cut=True, changed=None):
    """Return a tensor and its state after some updates, how many tensors the optimizer was given, and the optimizer."""
    tensor = torch.nn.Parameter(numbers(ELEMENTS, seed=0).to(dtype).view(1, -1))
    optimizer = kind([tensor], **options)
    cutting = Pieces(optimizer, kind)
    (group,) = optimizer.param_groups
    given = []
    for step in range(1, steps + 1):
        tensor.grad = numbers(ELEMENTS, seed=step).to(dtype).view(1, -1)
        if step == 2:
            group.update(changed or {})
        group["params"] = cutting.of([tensor], group) if cut else [tensor]
        given.append(len(group["params"]))
        optimizer.step()
        cutting.update_ended()
    return tensor.detach(), optimizer.state[tensor], given, optimizer


def same(one, other):
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", SAME)
def test_pieces_have_the_bits_of_the_whole_and_so_has_their_state(name):
    kind, options = SAME[name]
    whole, state, _, _ = trained(kind, options, cut=False)
    cut, cut_state, given, _ = trained(kind, options)
    assert given == [11, 11, 11]
    assert same(cut, whole)
    assert cut_state.keys() == state.keys()
    for key, value in state.items():
        assert value is cut_state[key] is None or same(cut_state[key], value), key
        assert getattr(cut_state[key], "shape", None) == getattr(value, "shape", None)


def test_state_that_begins_later_is_whole_too():
    options = {"lr": 1e-2, "momentum": 0.0}
    whole, state, _, _ = trained(torch.optim.SGD, options, cut=False, changed={"momentum": 0.9})
    cut, cut_state, given, _ = trained(torch.optim.SGD, options, changed={"momentum": 0.9})
    assert given == [11, 11, 11]
    assert same(cut, whole)
    assert same(cut_state["momentum_buffer"], state["momentum_buffer"])


def test_the_state_of_pieces_is_memory_of_the_whole():
    _, state, _, optimizer = trained(torch.optim.AdamW, {"lr": 1e-2})
    begin, size = state["exp_avg"].data_ptr(), state["exp_avg"].nbytes
    moments = [optimizer.state[piece]["exp_avg"] for piece in optimizer.param_groups[0]["params"]]
    assert [one.data_ptr() - begin for one in moments] == list(range(0, size, 4000))


@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum"])
def test_where_pieces_have_other_bits_the_tensor_stays_whole(name):
    kind, options = SAME[name]
    whole, _, _, _ = trained(kind, options, dtype=torch.bfloat16, cut=False)
    cut, _, given, _ = trained(kind, options, dtype=torch.bfloat16)
    assert given == [1, 1, 1]
    assert same(cut, whole)


def test_pieces_that_are_not_tried_have_other_bits(monkeypatch):
    kind, options = SAME["SGD with momentum"]
    whole, _, _, _ = trained(kind, options, dtype=torch.bfloat16, cut=False)
    monkeypatch.setattr(Pieces, "_is_same", lambda *_: True)
    forced, _, given, _ = trained(kind, options, dtype=torch.bfloat16)
    assert given == [11, 11, 11]
    assert not same(forced, whole)


def test_updates_of_the_whole_between_those_of_pieces_count_in_their_state(monkeypatch):
    """Options may come and go with which pieces have other bits."""
    is_same, calls = Pieces._is_same, []

    def at_times(*args):
        calls.append(None)
        return len(calls) not in (2, 4) and is_same(*args)

    monkeypatch.setattr(Pieces, "_is_same", at_times)
    whole, state, _, _ = trained(torch.optim.AdamW, {"lr": 1e-2}, steps=5, cut=False)
    cut, cut_state, given, _ = trained(torch.optim.AdamW, {"lr": 1e-2}, steps=5)
    assert given == [11, 1, 11, 1, 11]
    assert same(cut, whole)
    assert all(same(cut_state[name], value) for name, value in state.items())


def test_small_tensors_and_those_without_a_gradient_stay_whole():
    small, without = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(5000))
    optimizer = torch.optim.AdamW([small, without])
    small.grad = torch.ones(1000)
    found = Pieces(optimizer, torch.optim.AdamW).of([small, without], optimizer.param_groups[0])
    assert [one.data_ptr() for one in found] == [small.data_ptr(), without.data_ptr()]
