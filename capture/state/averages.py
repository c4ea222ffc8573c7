"""Finds averages of the captured weights that nobody has passed, which a restore would silently lose.

There is no mark on an average, so it is known by its class's name and by its shapes: an object that calls itself an EMA
or an average, and has a tensor of its own for each captured parameter. torch's AveragedModel, ema_pytorch.EMA, timm's
ModelEma and torch_ema.ExponentialMovingAverage are found.
"""

import gc
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["uncaptured_averages"]

_NAME = re.compile(r"EMA|Ema(?![a-z])|Averag")


def uncaptured_averages(module: torch.nn.Module, passed: Sequence[Any]) -> list[Any]:
    """Return the averages of the weights of `module` that exist, except those that are among the attributes of the
    `passed` objects, or inside of one, or around one.
    """
    own = {id(part) for part in module.modules()}
    shapes = Counter(parameter.shape for parameter in module.parameters() if not is_lazy(parameter))
    weights = {id(parameter) for parameter in module.parameters()}
    every = gc.get_objects()
    kinds = {kind for kind in set(map(type, every)) if _NAME.search(kind.__name__)}
    named = [one for one in every if type(one) in kinds and id(one) not in own] if kinds else []
    found = [one for one in named if shapes and not shapes - Counter(_shapes(one, besides=weights))]
    known = {id(part) for one in passed for value in _attributes(one) for part in _parts(value)} - own
    missing = [one for one in found if not known & {id(part) for part in _parts(one)}]
    inner = {id(part) for one in missing for part in _parts(one) if part is not one}
    return [one for one in missing if id(one) not in inner]


def _shapes(one: Any, *, besides: set[int]) -> Iterable[torch.Size]:
    tensors = [*one.parameters(), *one.buffers()] if isinstance(one, torch.nn.Module) else _listed_tensors(one)
    return [tensor.shape for tensor in tensors if id(tensor) not in besides and not is_lazy(tensor)]


def _listed_tensors(one: Any) -> list[torch.Tensor]:
    lists = [value for value in _attributes(one) if isinstance(value, list | tuple)]
    return [tensor for values in lists for tensor in values if isinstance(tensor, torch.Tensor)]


def _parts(one: Any) -> list[Any]:
    return list(one.modules()) if isinstance(one, torch.nn.Module) else [one]


def _attributes(one: Any) -> list[Any]:
    return list(getattr(one, "__dict__", {}).values())
