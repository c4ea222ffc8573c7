"""A misspelt argument of a door of `capture` is refused before anything begins, with the one that was meant."""

import inspect

import pytest
import torch

import capture
from catalog.errors import SetupError


@pytest.mark.parametrize(
    ("door", "argument", "message"),
    [
        ("enable", "evry", "enable: no argument 'evry'; the nearest are every, stats_every$"),
        ("restore", "modle", "restore: no argument 'modle'; the nearest are model, "),
        ("checkpoint_engine", "budget", "checkpoint_engine: no argument 'budget'; the nearest is budget_bytes$"),
        ("enable", "zzz", "enable: no argument 'zzz'; the arguments are target, every, history,"),
    ],
)
def test_a_misspelt_argument_has_a_nearest_one(tmp_path, monkeypatch, door, argument, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=message):
        getattr(capture, door)(torch.nn.Linear(2, 2), **{argument: 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("door", "given", "message"),
    [
        (
            "enable",
            2,
            "enable: too many arguments without a name, where only target may have none: .* every, history,",
        ),
        ("enable", 0, "enable: missing a required argument: 'target'; the arguments are target, every, history,"),
        ("restore", 3, "restore: too many arguments without a name, where only "),
    ],
)
def test_an_argument_that_needs_a_name_is_given_by_it(tmp_path, monkeypatch, door, given, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match=message):
        getattr(capture, door)(*[torch.nn.Linear(2, 2)] * given)
    assert not list(tmp_path.iterdir())


def test_the_doors_keep_their_signatures():
    assert list(inspect.signature(capture.enable).parameters)[:3] == ["target", "every", "history"]
