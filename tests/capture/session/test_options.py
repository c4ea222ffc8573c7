"""What `capture.enable` and `capture.checkpoint_engine` are asked for is checked first: the errors name argument and
value, and a refused call leaves no history behind.
"""

import pytest
import torch
from capture_helpers import make

import capture
from capture.deepspeed_checkpoints.options import EngineOptions
from capture.snapshot.writer_choice import WriterOptions
from catalog.errors import SetupError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every": 0}, "every=0: give a whole number of optimizer steps"),
        ({"every": "10"}, "every='10': give a whole number"),
        ({"on_full": "drop"}, 'on_full=\'drop\': give "wait" or "skip"'),
        ({"check": True}, "check=True: give"),
        ({"stats_every": None}, "stats_every=None: give a whole number"),
        ({"compact": 2}, "compact=2: give True or False"),
        ({"strict": 1}, "strict=1: give True or False"),
        ({"sigterm_limit_s": -1}, "sigterm_limit_s=-1: give a number of seconds above 0, or None"),
        ({"backend": "aio"}, "backend='aio': give"),
        ({"budget_bytes": "256 MiB"}, "budget_bytes='256 MiB': give a whole number of bytes"),
        ({"resume": True}, 'resume=True: give "auto" or None'),
        ({"providers": None}, r"providers=None: give a list of State Providers, \(\) for none"),
        ({"providers": [5]}, r"providers: 5 is no State Provider: wrap .* capture\.Stateful"),
        ({"history": 5}, "history=5: give the path of a folder"),
    ],
)
def test_a_refused_argument_is_named_with_its_value(history, given, said):
    model, optimizer = make()
    with pytest.raises(SetupError, match=said):
        capture.enable(model, **{"optimizer": optimizer, "history": history, **given})
    assert not history.exists()


@pytest.mark.parametrize("name", ["lazy", "pickle", "wait", "strict"])
def test_the_options_of_a_checkpoint_engine_are_true_or_false(name):
    with pytest.raises(SetupError, match=f"{name}='no': give True or False"):
        EngineOptions(writer=WriterOptions(backend=None, budget_bytes=1 << 20), **{name: "no"})


def test_restore_refuses_providers_that_are_none(history):
    model, optimizer = make()
    capture.enable(model, optimizer=optimizer, history=history, stats_every=0).close()
    before = [parameter.clone() for parameter in model.parameters()]
    for providers, said in ((None, "providers=None"), ([model], "providers: Net.*is no State Provider")):
        with pytest.raises(SetupError, match=f"(?s){said}"):
            capture.restore(0, history=history, model=model, optimizer=optimizer, providers=providers)
    assert all(map(torch.equal, before, model.parameters()))
