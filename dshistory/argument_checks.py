"""Checks a verb's arguments against its signature, so that an error names the argument, its value and what it may be.

Annotations that are not listed here take what only Python can give, such as an engine, or a reference to a checkpoint:
whoever uses these says what is wrong with them.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from catalog.errors import SetupError
from dshistory.options import Changes, Choices, Command, Predicate, SkippedSteps
from dshistory.patterns import Patterns

__all__ = ["check_arguments"]


def check_arguments(verb: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raise SetupError, with the argument, its value and what it may be, for the first value of a wrong type."""
    for name, given in arguments.items():
        parameter = signature.parameters[name]
        known, what = _expected(parameter.annotation)
        for value in given if parameter.kind is parameter.VAR_POSITIONAL else (given,):
            if not (known(value) or (value is None and type(None) in get_args(parameter.annotation))):
                raise SetupError(f"{verb}: {name}={value!r}: give {what}")


def _expected(annotation: Any) -> "_Expected":
    """Return what may be given for the annotation: a test, and its description."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, Choices):
            return _is_text, f"one of {', '.join(mark.words)}"
    return _KNOWN.get(annotation, (lambda value: True, "anything"))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(map(_is_number, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, Path))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_texts(value: object) -> bool:
    return _is_text(value) or (isinstance(value, Collection) and all(map(_is_text, value)))


def _is_predicate(value: object) -> bool:
    return _is_text(value) or callable(value)


def _are_steps(value: object) -> bool:
    each = value if _is_list(value) else [value]
    return isinstance(each, Sequence) and all(_is_whole(one) or _is_text(one) for one in each)


def _is_change(value: object) -> bool:
    return isinstance(value, Mapping) or callable(value) or (_is_list(value) and _are_texts(value))


_Expected = tuple[Callable[[object], bool], str]

_KNOWN: Final[Mapping[Any, _Expected]] = {
    str: (_is_text, "a text"),
    str | None: (_is_text, "a text, or None"),
    int: (_is_whole, "a whole number"),
    int | None: (_is_whole, "a whole number, or None"),
    float: (_is_number, "a number"),
    float | None: (_is_number, "a number, or None"),
    Sequence[float]: (_are_numbers, "a list of numbers"),
    Sequence[float] | None: (_are_numbers, "a list of numbers, or None"),
    bool: (_is_flag, "True or False"),
    Path | str: (_is_path, "a path"),
    Path | str | None: (_is_path, "a path, or None"),
    Patterns: (_are_texts, "a text, or a list of texts"),
    Patterns | None: (_are_texts, "a text, a list of texts, or None"),
    Predicate: (_is_predicate, "a condition, as 'loss > 4.5', or a function of a checkpoint"),
    Changes: (_is_change, 'a dict, as {"lr_scale": 0.5}, texts, as "lr_scale=0.5", or a function'),
    Command: (_is_list, 'a list of words, as ["python", "train.py"]'),
    SkippedSteps: (_are_steps, "steps, as [83, 84] or '83-90'"),
    Sequence[Any]: (_is_list, "a list, as ()"),
}
