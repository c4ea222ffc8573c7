"""What a trajectory can show, each number made of sums over elements, so that it means the same of a tensor, a layer and a model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.errors import NotFoundError

__all__ = ["METRICS", "MOVES", "Floats", "Metric", "merged", "metric_named"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Metric:
    """`value` gives the number of arrays of `parts`, in that order; NaN where it is unknown. A move is about the way from the
    checkpoint before."""

    parts: tuple[str, ...]
    value: Callable[..., Floats]
    is_move: bool = False


def _ratio(above: Floats, below: Floats) -> Floats:
    return above / np.where(below == 0, np.nan, below)


def _root(squares: Floats) -> Floats:
    return np.sqrt(squares)


def _itself(values: Floats) -> Floats:
    return values


def _least(values: Floats) -> Floats:
    """Of nothing at all there is none."""
    return np.where(values == math.inf, np.nan, values)


def _most(values: Floats) -> Floats:
    return np.where(values == -math.inf, np.nan, values)


def _rms(squares: Floats, finite: Floats) -> Floats:
    return np.sqrt(_ratio(squares, finite))


def _std(squares: Floats, sums: Floats, finite: Floats) -> Floats:
    mean = _ratio(sums, finite)
    return np.sqrt(np.maximum(_ratio(squares, finite) - mean * mean, 0.0))


def _relative_update(update: Floats, before: Floats) -> Floats:
    return np.where(update == 0, 0.0, np.sqrt(update) / np.sqrt(before))


def _cosine(dot: Floats, before: Floats, after: Floats) -> Floats:
    return np.clip(_ratio(dot, np.sqrt(before) * np.sqrt(after)), -1.0, 1.0)


_ALL: Final[Mapping[str, Metric]] = {
    "norm": Metric(("squares",), _root),
    "nonfinite": Metric(("nonfinite",), _itself),
    "nan": Metric(("nan",), _itself),
    "inf": Metric(("inf",), _itself),
    "zeros": Metric(("zeros", "numel"), _ratio),
    "mean": Metric(("sum", "finite"), _ratio),
    "std": Metric(("squares", "sum", "finite"), _std),
    "rms": Metric(("squares", "finite"), _rms),
    "min": Metric(("least",), _least),
    "max": Metric(("most",), _most),
    "relative_update": Metric(("update_squares", "before_squares"), _relative_update, True),
    "update_norm": Metric(("update_squares",), _root, True),
    "cosine": Metric(("dot", "before_squares", "squares"), _cosine, True),
    "max_change": Metric(("max_change",), _itself, True),
    "changed_share": Metric(("changed", "numel"), _ratio, True),
    "sign_flips": Metric(("sign_flips",), _itself, True),
}
_ALSO: Final = {"update_ratio": "relative_update"}
"""The field's name for what a diff calls relative_update."""

METRICS: Final = (*_ALL, *_ALSO)
MOVES: Final = tuple(name for name, metric in _ALL.items() if metric.is_move)

_TOGETHER: Final[Mapping[str, tuple[np.ufunc, float]]] = {
    "least": (np.minimum, math.inf),
    "most": (np.maximum, -math.inf),
    "max_change": (np.maximum, 0.0),
}
"""How a part of several tensors is put together, and what of nothing at all is; added up are the others."""


def metric_named(name: str) -> Metric:
    """NotFoundError, naming those there are, for a metric that is none."""
    metric = _ALL.get(_ALSO.get(name, name))
    if metric is None:
        raise NotFoundError(f"no metric {name!r}; the metrics are {', '.join(METRICS)}")
    return metric


def merged(part: str, cells: Floats, present: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64]) -> Floats:
    """(groups, checkpoints) of a part's (tensors, checkpoints): of the tensors of each group together, those that are there.
    `groups` numbers them from 0 on. NaN where one of them is unknown, or none is there."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups.max() + 1))
    together, of_nothing = _TOGETHER.get(part, (np.add, 0.0))
    values: Floats = together.reduceat(np.where(present, cells, of_nothing)[order], starts, axis=0)
    values[~np.logical_or.reduceat(present[order], starts, axis=0)] = math.nan
    return values
