"""Whatever a user gets in hand says what it is: every class that the public names lead to has a repr of its own."""

import importlib
import inspect
import re

import pytest
import torch
from architecture import LAYERS, modules_of

import capture
import catalog
import dshistory
from capture.state import providers
from catalog.history import History
from catalog.run_writer import create_history

OURS = (*LAYERS,)
BEYOND = ("capture.huggingface", "capture.deepspeed_checkpoints.engine", "catalog.history", "native")
"""Modules beside the packages' own names whose classes users hold."""


def public_classes() -> dict[str, type]:
    """Return every class by name that the public names lead to: by itself, or by the annotations of a public function,
    method or property, whose names are looked up among all classes of the project.
    """
    every = {}
    for package in LAYERS:
        for name in modules_of(package):
            module = importlib.import_module(name) if name != "dshistory.__main__" else None
            every |= {
                key: value
                for key in getattr(module, "__all__", ())
                if inspect.isclass(value := getattr(module, key)) and value.__module__.split(".")[0] in OURS
            }
    modules = [capture, catalog, dshistory, providers, *map(importlib.import_module, BEYOND)]
    waiting = [getattr(module, name) for module in modules for name in module.__all__]
    found: dict[str, type] = {}
    while waiting:
        thing = waiting.pop()
        if not inspect.isclass(thing):
            if callable(thing):
                waiting += [every[word] for word in words_of(thing) if word in every and word not in found]
        elif thing.__module__.split(".")[0] in OURS and thing.__qualname__ not in found:
            found[thing.__qualname__] = thing
            members = [value for name, value in vars(thing).items() if not name.startswith("_")]
            waiting += [one.fget if isinstance(one, property) else getattr(one, "__func__", one) for one in members]
    return found


def words_of(function: object) -> set[str]:
    """Return the words in the annotation of what a function returns."""
    returned = getattr(function, "__annotations__", {}).get("return", "")
    return set(re.findall(r"\w+", returned if isinstance(returned, str) else inspect.formatannotation(returned)))


def test_every_public_class_has_a_repr_of_its_own():
    classes = public_classes()
    assert {"Session", "Stateful", "Explorer", "History", "CheckpointRef", "DiffTable", "Exploration"} <= set(classes)
    plain = []
    for name, one in classes.items():
        owner = next(base for base in one.__mro__ if "__repr__" in vars(base))
        if owner.__module__.split(".")[0] not in OURS and not issubclass(one, BaseException):
            plain.append(name)
    protocols = [name for name in plain if getattr(classes[name], "_is_protocol", False)]
    native_handles = [name for name in plain if classes[name].__module__.startswith("native")]
    assert set(plain) - {*protocols, *native_handles} == set()


def test_a_class_without_one_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(History, "__repr__")
    with pytest.raises(AssertionError, match="History"):
        test_every_public_class_has_a_repr_of_its_own()


def test_they_say_what_they_are(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    create_history(tmp_path)
    said = {
        repr(History.open(tmp_path)): f"<History: {tmp_path}>",
        repr(capture.Stateful("ema", {})): "<Stateful 'ema': dict, read_at='next_forward'>",
        repr(providers.ModuleParameters(model)): "<ModuleParameters of Sequential>",
        repr(providers.Buffers(model)): "<Buffers of Sequential>",
        repr(providers.TorchOptimizer(optimizer, model, name="optimizer")): "<TorchOptimizer 'optimizer': SGD>",
        repr(providers.Counters(lambda: {"step": 3}, print)): "<Counters: step 3>",
    }
    assert list(said) == list(said.values())
