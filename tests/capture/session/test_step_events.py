"""A State Provider declares when its objects are read; this alone decides, for captured and for late steps."""

import pytest
from capture_helpers import make, one_step

import capture
from catalog.errors import SetupError


class Average:
    """The loop sets the value of this user provider after the optimizer, and the next batch sets it again."""

    def __init__(self, read_at: str | None) -> None:
        self.value = "initial"
        if read_at is not None:
            self.read_at = read_at

    def tensors(self):
        return ()

    def objects(self):
        return {"average": (self.value, "replicated")}

    def prepare(self, available) -> None: ...

    def finish(self, available) -> None:
        self.value = available.objects["average"]


def train(history, provider, *, every: int) -> str:
    """Train three steps and return the run."""
    model, optimizer = make()
    with capture.enable(model, optimizer=optimizer, every=every, history=history, providers=[provider]) as session:
        for step in range(1, 4):
            optimizer_hook = optimizer.register_step_pre_hook(
                lambda *_, step=step: setattr(provider, "value", f"in update {step}")
            )
            one_step(model, optimizer)
            optimizer_hook.remove()
            provider.value = f"after update {step}"
    return session.run


def stored(history, run: str, step: int) -> str:
    model, optimizer = make(seed=9)
    provider = Average(None)
    capture.restore(f"{run}:{step}", history=history, model=model, optimizer=optimizer, providers=[provider])
    return provider.value


@pytest.mark.parametrize(
    ("declared", "expected"), [("step", "in update"), ("next_forward", "after update"), (None, "after update")]
)
def test_a_users_provider_declares_when_it_is_read(history, declared, expected):
    run = train(history, Average(declared), every=1)
    assert [stored(history, run, step) for step in (1, 2, 3)] == [f"{expected} {step}" for step in (1, 2, 3)]


@pytest.mark.parametrize(("declared", "expected"), [("step", "in update 3"), ("next_forward", "after update 3")])
def test_a_step_captured_late_follows_the_same_declaration(history, declared, expected):
    run = train(history, Average(declared), every=100)
    assert stored(history, run, 3) == expected


def test_stateful_accepts_the_declaration_as_an_argument(history):
    model, optimizer = make()
    early, late = {"value": 0}, {"value": 0}
    providers = [capture.Stateful("early", early, read_at="step"), capture.Stateful("late", late)]
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers) as session:
        for _ in range(2):
            one_step(model, optimizer)
            early["value"] += 1
            late["value"] += 1
    capture.restore(f"{session.run}:2", history=history, model=model, optimizer=optimizer, providers=providers)
    assert (early["value"], late["value"]) == (1, 2)


def test_an_unknown_declaration_is_refused_by_name(history):
    model, optimizer = make()
    with pytest.raises(SetupError, match=r"Average\.read_at is 'Step': it must be one of .*'next_forward'"):
        capture.enable(model, optimizer=optimizer, history=history, providers=[Average("Step")])


def test_the_name_of_an_object_decides_nothing(history):
    """A user's object with the name of one of the loop's is read when its own provider declares."""
    model, optimizer = make()
    mine = {"value": 0}
    providers = [capture.Stateful("loss_scaler", mine, read_at="step")]
    with capture.enable(model, optimizer=optimizer, every=1, history=history, providers=providers) as session:
        for _ in range(2):
            one_step(model, optimizer)
            mine["value"] += 1
    capture.restore(f"{session.run}:2", history=history, model=model, optimizer=optimizer, providers=providers)
    assert mine["value"] == 1
