"""Several optimizers, undeclared ones, and ones that do not fit a checkpoint are handled or refused by name."""

import warnings

import pytest
import torch
from capture_helpers import assert_same, bits, committed_steps, make, one_step, reference

import capture
from catalog.errors import MismatchError, UnsupportedError


class Pair(torch.nn.Module):
    """The model has two parts with an optimizer each, like a generator and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = torch.nn.Linear(32, 32)
        self.maker = torch.nn.Linear(32, 32)


def pair() -> tuple[Pair, list[torch.optim.Optimizer]]:
    torch.manual_seed(3)
    model = Pair()
    parts = (model.critic, model.maker)
    return model, [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]


def turn(model: Pair, optimizers: list[torch.optim.Optimizer]) -> None:
    for part, optimizer in zip((model.critic, model.maker), optimizers, strict=True):
        part(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(model: Pair, optimizers: list[torch.optim.Optimizer]) -> list[bytes]:
    return [bits(state["exp_avg"]) for one in optimizers for state in one.state.values()]


def test_two_optimizers_are_one_training(history):
    model, optimizers = pair()
    with capture.enable(model, optimizer=optimizers, every=1, history=history) as session:
        for _ in range(3):
            turn(model, optimizers)
        expected, weights = moments(model, optimizers), reference(model, optimizers[0])["model"]
        turn(model, optimizers)
        after = moments(model, optimizers)
    assert committed_steps(history, session.run) == [0, 1, 2, 3, 4]

    again, others = pair()
    capture.restore(3, history=history, model=again, optimizer=others)
    assert moments(again, others) == expected
    assert all(bits(tensor) == bits(dict(again.named_parameters())[name]) for name, tensor in weights.items())
    turn(again, others)
    assert moments(again, others) == after


def test_an_optimizer_that_is_not_captured_is_reported_and_still_waits_for_the_barrier(history):
    model, (critic, maker) = pair()
    with capture.enable(model, optimizer=maker, every=1, history=history) as session:
        with pytest.warns(UserWarning, match=r"Adam that is not captured updates 2 parameters.*optimizer=\["):
            turn(model, [critic, maker])
        expected = {kind: tensors for kind, tensors in reference(model, maker).items() if tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            turn(model, [critic, maker])
    assert committed_steps(history, session.run) == [0, 1, 2]
    assert_same(capture.restore(1, history=history), expected)


def test_an_optimizer_of_another_model_is_ignored(history):
    model, optimizer = make()
    other, others_optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history), warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(other, others_optimizer)
        one_step(model, optimizer)


def test_a_model_and_its_compiled_form_are_one_training(history):
    model, optimizer = make()
    first = capture.enable(model, optimizer=optimizer, every=1, history=history)
    compiled = torch.compile(model, backend="eager")
    second = capture.enable(compiled, optimizer=optimizer, every=1, history=history)
    for _ in range(2):
        one_step(model, optimizer)
    second.close()
    first.close()
    assert committed_steps(history, first.run) == [0]
    assert committed_steps(history, second.run) == [0, 1, 2]


def test_another_class_of_optimizer_is_refused_and_changes_nothing(history):
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        one_step(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    before = reference(model, other)
    with pytest.raises(MismatchError, match=r"AdamW.*SGD.*nothing was changed"):
        capture.restore(0, history=history, model=model, optimizer=other)
    assert_same(reference(model, other), before)
    assert other.param_groups[0]["lr"] == 0.5


def test_state_that_belongs_to_no_parameter(history):
    model, optimizer = make()
    optimizer.state["calls"] = 7
    with capture.enable(model, optimizer=optimizer, every=1, history=history):
        pass
    optimizer.state["calls"] = 99
    optimizer.state["more"] = 1
    capture.restore(0, history=history, model=model, optimizer=optimizer)
    assert optimizer.state["calls"] == 7
    assert "more" not in optimizer.state


def test_an_object_that_is_not_an_optimizer_is_refused(history):
    model, optimizer = make()
    with pytest.raises(UnsupportedError, match=r"expected a torch\.optim\.Optimizer, got a builtins\.str"):
        capture.enable(model, optimizer=[optimizer, "adam"], history=history)


def test_ties_that_the_checkpoint_does_not_have(history):
    def two(tied: bool) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    model = two(tied=False)
    with capture.enable(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), history=history):
        pass
    target = two(tied=True)
    before = bits(target[0].weight.detach())
    with pytest.raises(MismatchError, match=r"'0\.weight' and '1\.weight' are tied here, but differ"):
        capture.restore(0, history=history, model=target)
    assert bits(target[0].weight.detach()) == before


class Remembering(torch.nn.Linear):
    """The module has extra state."""

    seen = 5

    def get_extra_state(self) -> dict:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules_comes_back(history):
    model = torch.nn.Sequential(Remembering(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture.enable(model, optimizer=optimizer, history=history):
        pass
    model[0].seen = 77
    capture.restore(0, history=history, model=model, optimizer=optimizer)
    assert model[0].seen == 5


def test_state_that_is_not_restored_is_named(history):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with capture.enable(model, optimizer=optimizer, scheduler=scheduler, history=history):
        pass
    with pytest.warns(UserWarning, match=r"also has lr_scheduler.*pass scheduler="):
        capture.restore(0, history=history, model=model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture.restore(0, history=history, model=model, optimizer=optimizer, scheduler=scheduler)
        capture.restore(0, history=history, model=model)


class CallsItsParent(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_closure_inside_a_step_of_two_classes_counts_once(history):
    """Both classes have torch's hooks, and the closure runs a forward between them."""
    torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    model, _ = make()
    optimizer = CallsItsParent(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        return loss

    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        for _ in range(3):
            optimizer.step(closure)
    assert committed_steps(history, session.run) == [0, 1, 2, 3]


def test_a_step_that_raised_ends_no_capture(history):
    """This holds also without a training forward that follows, as when fine-tuning in eval mode."""
    model, optimizer = make()
    model.eval()

    def closure():
        raise ZeroDivisionError

    with capture.enable(model, optimizer=optimizer, every=1, history=history) as session:
        one_step(model, optimizer)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        for _ in range(2):
            one_step(model, optimizer)
    assert committed_steps(history, session.run) == [0, 1, 2, 3]
