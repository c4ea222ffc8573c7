"""Metrics and tags that a user records for a step, checked where they are given, not where they are written."""

import operator
from collections.abc import Mapping
from typing import Any

import torch

from catalog.errors import SetupError

__all__ = ["checked_metrics", "checked_tag"]

_RESERVED = ("latest", "best")


def checked_metrics(metrics: Any, named: Mapping[str, Any]) -> dict[str, float | torch.Tensor]:
    """Return the metrics, and those given by their names, as they are now, each a real number; tensors of one element
    are copied and not read. SetupError names a metric that is no real number, or given twice.
    """
    if not isinstance(metrics, Mapping):
        raise SetupError(f"log: {metrics!r} has no name: give metrics as log(loss=0.5) or log({{'loss': 0.5}})")
    twice = sorted(set(metrics) & set(named))
    if twice:
        name = twice[0]
        raise SetupError(f"log: metric {name!r} is given twice, as {metrics[name]!r} and as {named[name]!r}: give one")
    metrics = {**metrics, **named}
    return {_text(name, "the name of a metric"): _number(name, value) for name, value in metrics.items()}


def checked_tag(name: Any, step: Any) -> tuple[str, int]:
    """Return the name and the step of a tag. SetupError for a name that reads as a step, or no number."""
    text = _text(name, "tag")
    if not text:
        raise SetupError("tag: the name is empty: give a word")
    if ":" in text or text.lstrip("-").isdigit() or text in _RESERVED:
        raise SetupError(f"tag {text!r} would read as a step: take a word without ':'")
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or number < 0:
        raise SetupError(f"tag {text!r}: the step must be a whole number, 0 or more, not {step!r}")
    return text, number


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise SetupError(f"{what} must be a string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SetupError(f"{what} {value!r} is no valid text: {error.reason}") from error
    return value


def _number(name: str, value: Any) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise SetupError(
                f"log: metric {name!r} is a {value.dtype} tensor of shape {tuple(value.shape)}: give one real number"
            )
        return value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SetupError(f"log: metric {name!r} is {value!r}: give one real number") from error
