"""The names of an object's tensors, by which they can be looked at: their places in the object's JSON tree."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["tensor_names"]


def tensor_names(tree: Any, *, of: str) -> Mapping[str, str]:
    """Return {extent name: place} for each tensor of the object `of` that is an extent: keys and indices on the way to
    it, joined by dots, as `module.layers.0.weight`; `of` for an object that is itself a tensor.

    No two are equal: of several tensors with the same place (the keys "a.b" and, inside of "a", "b"), all but the first
    get a number behind it.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for entry, place in _places(tree, ""):
        base = place or of
        name, count = base, 1
        while name in taken:
            count += 1
            name = f"{base} ({count})"
        taken.add(name)
        names[entry] = name
    return names


def _places(tree: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, list):
        for i, item in enumerate(tree):
            if type(item) in (dict, list):
                yield from _places(item, _joined(at, i))
    elif isinstance(tree, dict):
        tag = tree.get("$")
        if tag in ("tensor", "ndarray") and "entry" in tree:
            yield tree["entry"], at
        elif tag == "dict":
            for key, item in tree["items"]:
                yield from _places(item, _joined(at, key["items"] if isinstance(key, dict) and "items" in key else key))
        elif tag == "tuple":
            yield from _places(tree["items"], at)
        elif tag is None:
            for key, item in tree.items():
                yield from _places(item, _joined(at, key))


def _joined(at: str, key: Any) -> str:
    return f"{at}.{key}" if at else str(key)
