"""Optimizers around optimizers, written as users write them: every step is taken where the outermost call ends."""

from collections import defaultdict

import pytest
import torch
from capture_helpers import MIB, assert_same, committed_steps, faulty_session, make, one_step, reference

import capture
import native
from capture.loops.pytorch import wrappers

SLOW = {"delay_us": 20_000}


class Lookahead(torch.optim.Optimizer):
    """As in most implementations, the parent's constructor is not called, and weights are written through `.data`."""

    def __init__(self, optimizer, k=2, alpha=0.5, name="slow"):
        self.optimizer, self.k, self.alpha, self.name = optimizer, k, alpha, name
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group[f"counter of {self.name}"] = 0

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group[f"counter of {self.name}"] += 1
            for fast in group["params"]:
                if self.name not in self.state[fast]:
                    self.state[fast][self.name] = fast.data.clone()
                slow = self.state[fast][self.name]
                if group[f"counter of {self.name}"] % self.k == 0:
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: an update is two calls, with a second backward between them."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (p.grad.norm() + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def train(model, wrapper, inner, steps) -> dict[int, dict]:
    """Train, and return eager copies of what the inner optimizer and the weights are after each step."""
    expected = {}
    for step in range(1, steps + 1):
        if isinstance(wrapper, SAM):
            width = next(model.parameters()).shape[-1]
            x = torch.randn(8, width)

            def closure(x=x):
                loss = model(x).square().mean()
                loss.backward()
                return loss

            closure()
            if step % 2:
                wrapper.first_step(zero_grad=True)
                closure()
                wrapper.second_step(zero_grad=True)
            else:
                wrapper.step(closure)
                wrapper.zero_grad()
        else:
            one_step(model, wrapper)
        expected[step] = reference(model, inner)
    return expected


def wrapped(kind, width=64, seed=5):
    model, _ = make(width, seed=seed)
    if kind is SAM:
        wrapper = SAM(model.parameters(), torch.optim.AdamW, lr=0.01)
        return model, wrapper, wrapper.base_optimizer
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrapper = Lookahead(inner)
    return model, (Lookahead(wrapper, k=3, name="slower") if kind == "nested" else wrapper), inner


@pytest.mark.guards("A checkpoint holds one step")
@pytest.mark.parametrize("passed", ["wrapper", "inner"])
@pytest.mark.parametrize("kind", [Lookahead, SAM, "nested"])
@pytest.mark.filterwarnings("ignore:the (Lookahead|SAM) around the optimizer is not captured")
def test_every_checkpoint_is_what_the_outermost_step_has_left(history, kind, passed):
    model, wrapper, inner = wrapped(kind, width=500)
    given = wrapper if passed == "wrapper" else inner
    session = faulty_session(model, given, history, faults=native.Faults(**SLOW), budget_bytes=4 * MIB, stats_every=0)
    expected = train(model, wrapper, inner, 4)
    session.close()
    assert session.stats.failed == 0
    assert committed_steps(history, session.run) == [0, 1, 2, 3, 4]
    for step, state in expected.items():
        stored = capture.restore(f"{session.run}:{step}", history=history)
        assert_same({name: stored[name] for name in state}, state)


@pytest.mark.parametrize("kind", [Lookahead, SAM, "nested"])
def test_a_wrapped_training_goes_on_bit_for_bit(history, kind):
    model, wrapper, inner = wrapped(kind)
    with capture.enable(model, optimizer=wrapper, every=1, history=history, stats_every=0) as session:
        train(model, wrapper, inner, 3)
        session.wait()
        torch.manual_seed(3)
        expected = train(model, wrapper, inner, 3)
    again, its_wrapper, its_inner = wrapped(kind, seed=9)
    capture.restore(f"{session.run}:3", history=history, model=again, optimizer=its_wrapper)
    torch.manual_seed(3)
    for step, state in train(again, its_wrapper, its_inner, 3).items():
        assert_same(state, expected[step])


def test_a_wrapper_that_is_not_passed_is_named(history):
    model, wrapper, inner = wrapped(Lookahead)
    with pytest.warns(UserWarning, match="the Lookahead around the optimizer is not captured"):
        capture.enable(model, optimizer=inner, history=history).close()
    assert "step" not in vars(wrapper)


def test_a_wrapper_of_any_class_that_is_not_torchs_own_is_found():
    class Unhashable(type):
        __hash__ = None

        def __eq__(cls, other):
            return cls is other

    class Adam(torch.optim.SGD, metaclass=Unhashable):
        """Its name, and the class that it derives from, are those of optimizers that wrap none."""

        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    _, _, inner = wrapped(Lookahead)
    outer = Adam(inner)
    assert any(found is outer for found in wrappers.wrappers_of(inner))


def test_without_a_class_that_may_be_a_wrapper_no_object_is_looked_at(monkeypatch):
    own = [kind for kind in wrappers._subclasses(torch.optim.Optimizer) if kind.__module__.startswith("torch.optim")]
    assert {torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad} <= set(own)
    monkeypatch.setattr(wrappers, "_subclasses", lambda kind: iter(own))
    monkeypatch.setattr(wrappers.gc, "get_objects", lambda: pytest.fail("all objects were looked at"))
    assert wrappers.wrappers_of(make()[1]) == []


def test_half_an_update_is_no_step(history):
    """The training ends between the two calls, or inside the second one."""
    model, wrapper, _ = wrapped(SAM)
    session = capture.enable(model, optimizer=wrapper, every=1, history=history, stats_every=0)
    train(model, wrapper, wrapper.base_optimizer, 1)
    model(torch.randn(8, 64)).square().mean().backward()
    wrapper.first_step()
    session.close()
    assert committed_steps(history, session.run) == [0, 1]


def test_an_exception_behind_the_inner_step_leaves_no_checkpoint(history):
    model, wrapper, inner = wrapped(Lookahead)
    session = capture.enable(model, optimizer=wrapper, every=1, history=history, stats_every=0)
    expected = train(model, wrapper, inner, 1)
    del wrapper.param_groups[0]["counter of slow"]
    with pytest.raises(KeyError, match="counter"):
        one_step(model, wrapper)
    session.close()
    assert committed_steps(history, session.run) == [0, 1]
    stored = capture.restore(f"{session.run}:1", history=history)
    assert_same({name: stored[name] for name in expected[1]}, expected[1])
