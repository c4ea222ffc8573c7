"""Classes whose instances are stored as data: what to take of an instance, and how to make one of it again.

A class is found by its exact type when encoding and by its tag when decoding, so a file can name no class that is not listed.
"""

import argparse
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch.torch_version import TorchVersion

__all__ = ["COMMON_CLASSES", "KnownClass", "by_fields", "by_value"]


@dataclass(frozen=True, slots=True)
class KnownClass:
    """`take` gives plain data, or further known instances; `make` is its inverse and runs no code of the file's choice."""

    tag: str
    cls: type
    take: Callable[[Any], Any]
    make: Callable[[Any], Any]


def by_fields(tag: str, cls: Any) -> KnownClass:
    """A class whose instances are just their `__dict__`."""

    def make(fields: dict[str, Any]) -> Any:
        made = cls.__new__(cls)
        made.__dict__.update(fields)
        return made

    return KnownClass(tag, cls, lambda instance: dict(vars(instance)), make)


def by_value(tag: str, cls: type[Enum]) -> KnownClass:
    """An enumeration of plain values."""
    return KnownClass(tag, cls, lambda member: member.value, cls)


def _span(value: slice | range) -> list[Any]:
    return [value.start, value.stop, value.step]


COMMON_CLASSES = (
    KnownClass("size", torch.Size, list, torch.Size),
    KnownClass("set", set, list, set),
    KnownClass("frozenset", frozenset, list, frozenset),
    KnownClass("complex", complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    KnownClass("slice", slice, _span, lambda parts: slice(*parts)),
    KnownClass("range", range, _span, lambda parts: range(*parts)),
    KnownClass("bytearray", bytearray, bytes, bytearray),
    KnownClass("path", type(pathlib.Path()), str, pathlib.Path),
    KnownClass("torch_version", TorchVersion, str, TorchVersion),
    by_fields("argparse.Namespace", argparse.Namespace),
    by_fields("SimpleNamespace", SimpleNamespace),
)
"""Of Python and torch."""
