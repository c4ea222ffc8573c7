"""Every figure that the explorer computes, defined once, as a function of sums over the elements of a tensor.

The sums of two tensors add up, so a figure means the same for a tensor, a layer and a whole model: see `merged`. The
functions work element by element on float64 arrays or single numbers. NaN stands for unknown, and an unknown sum gives
an unknown figure. Sums are over finite elements; for a figure about an update, over the elements that are finite on
both sides.

The sums ("parts") that figures are made of:

    squares, sum                  of the elements: their squares, themselves
    least, most                   the smallest and the largest element
    numel, finite, zeros          how many elements there are, how many of them are finite, how many are zero
    nan, inf, nonfinite           how many elements are NaN, infinite, either of the two
    before_squares                the squares of the elements in the checkpoint before
    update_squares, dot           the squares of (after - before), the products before * after
    max_change                    the largest |after - before|
    changed, sign_flips           how many elements have another value, another sign

`catalog` may not import this package. The view `statistics` (`catalog.index.schema`), the columns that
`catalog.statistics.updates` adds and the parts that `dshistory.trends.statistics_matrix` selects say norm, mean, rms,
relative_update, cosine and the share of zeros in SQL or NumPy again; tests/dshistory/test_metrics_sql.py holds them to
the functions below on the same data, with zero norms, NaN, infinities and empty tensors.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.errors import NotFoundError

__all__ = [
    "AS_NORMAL",
    "METRICS",
    "UPDATE_METRICS",
    "Floats",
    "Metric",
    "changed_share",
    "cosine",
    "dot_of_squares",
    "known",
    "maximum",
    "mean",
    "merged",
    "metric_named",
    "minimum",
    "movement",
    "norm",
    "relative_update",
    "rms",
    "std",
    "times_usual",
    "typical_movement",
    "typical_size",
    "usual_movement",
    "zeros_share",
]

AS_NORMAL: Final = 1.4826
"""A median of distances from a median, times this, is the standard deviation of a normal distribution."""

Floats = npt.NDArray[np.float64]
Sums = Floats | float


def norm(squares: Sums) -> Floats:
    """Return the Euclidean length of the elements: `sqrt(squares)`, in the unit of the elements, from 0 up; 0 for an
    empty tensor. Of `update_squares` it is the update norm, the distance from the checkpoint before."""
    root: Floats = np.sqrt(squares)
    return root


def mean(total: Sums, finite: Sums) -> Floats:
    """Return the mean of the finite elements: `sum / finite`; NaN where no element is finite."""
    return _ratio(total, finite)


def rms(squares: Sums, finite: Sums) -> Floats:
    """Return the root of the mean square of the finite elements: `sqrt(squares / finite)`, from 0 up; NaN where no
    element is finite."""
    return norm(_ratio(squares, finite))


def std(squares: Sums, total: Sums, finite: Sums) -> Floats:
    """Return the standard deviation of the finite elements: `sqrt(squares / finite - mean^2)`, with divisor `finite`
    (that of a population), from 0 up; NaN where no element is finite. It loses digits where the mean is much larger
    than the deviation."""
    average = mean(total, finite)
    return norm(np.maximum(_ratio(squares, finite) - average * average, 0.0))


def zeros_share(zeros: Sums, numel: Sums) -> Floats:
    """Return the share of elements that are zero, of either sign: `zeros / numel`, from 0 to 1; NaN for an empty
    tensor."""
    return _ratio(zeros, numel)


def minimum(least: Sums) -> Floats:
    """Return the smallest element that is not NaN; NaN where there is none.

    `least` is then inf, the neutral element of min. A tensor whose smallest element is inf gives NaN too."""
    return np.where(np.equal(least, math.inf), np.nan, least)


def maximum(most: Sums) -> Floats:
    """Return the largest element that is not NaN; it is NaN where there is none."""
    return np.where(np.equal(most, -math.inf), np.nan, most)


def relative_update(update_squares: Sums, before_squares: Sums) -> Floats:
    """Return the length of the update relative to the weights that it changed: `|after - before| / |before|`, from 0
    up.

    0 where nothing changed, whatever the norm is, also of an empty tensor; inf where the tensor was zero before and is
    not any more. The ratio of update to weight is what layer-wise learning rates hold constant: You, Gitman, Ginsburg,
    "Large Batch Training of Convolutional Networks" (LARS), arXiv:1708.03888."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(np.equal(update_squares, 0), 0.0, norm(update_squares) / norm(before_squares))


def typical_size(sizes: Floats, numel: Floats) -> Floats:
    """Return the size of an ordinary element: the median over all elements of the rms of their tensors, from 0 up.

    `sizes` are the rms of tensors (tensors,) or (tensors, checkpoints), `numel` their numbers of elements in the same
    shape; tensors that are zero or not finite do not count. The result has no axis of tensors; it is 0 where none
    counts."""
    if not len(sizes):
        return np.zeros(sizes.shape[1:])
    with np.errstate(invalid="ignore"):
        counts = (sizes > 0) & np.isfinite(sizes)
    order = np.argsort(np.where(counts, sizes, math.inf), axis=0)
    elements = np.take_along_axis(np.where(counts, numel, 0.0), order, axis=0).cumsum(axis=0)
    middle = np.argmax(elements >= elements[-1] / 2, axis=0)[np.newaxis]
    found: Floats = np.take_along_axis(sizes, np.take_along_axis(order, middle, axis=0), axis=0)[0]
    return np.where(elements[-1] > 0, found, 0.0)


def movement(update_squares: Sums, before_squares: Sums, numel: Sums, typical: Sums) -> Floats:
    """Return how far a tensor moved, relative to its own length or, where that is longer, the length that it would have
    if its elements had the size `typical`: `|after - before| / max(|before|, typical sqrt(numel))`, from 0 up.

    With this floor a bias that was born at zero has moved no further than a matrix whose elements moved as far. It is
    `relative_update` where the tensor is not smaller than typical ones, 0 where nothing changed."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        length = np.maximum(norm(before_squares), typical * norm(numel))
        return np.where(np.equal(update_squares, 0), 0.0, norm(update_squares) / length)


def typical_movement(moved: Floats) -> Floats:
    """Return the median `movement` of the tensors that moved, of (tensors,) or (tensors, checkpoints), from 0 up; 0
    where none did."""
    if not len(moved):
        return np.zeros(moved.shape[1:])
    with np.errstate(invalid="ignore"):
        counts = (moved > 0) & np.isfinite(moved)
    ordered = np.sort(np.where(counts, moved, math.inf), axis=0)
    middle = np.maximum(counts.sum(axis=0) - 1, 0)[np.newaxis] // 2
    found: Floats = np.take_along_axis(ordered, middle, axis=0)[0]
    return np.where(np.isinf(found), 0.0, found)


def usual_movement(own: Sums, typical: Sums) -> Floats:
    """Return the movement that counts as usual for a tensor: that of its peers or its own past, or a third of the
    typical movement of all, where that is more. So noise that is ten times as loud as noise is no news."""
    usual: Floats = np.maximum(own, typical / 3)
    return usual


def times_usual(moved: Floats, peers: Sequence[Hashable]) -> Floats:
    """Return how many times as far as such tensors usually do each tensor moved: its `movement` over the
    `usual_movement` of its peers, which is their median, from 0 up; NaN where its movement is unknown.

    `peers` names the group of each tensor. Only what moved counts in a median, and a group has one with three members,
    the tensor itself included. A tensor without such a group is measured against the group that moves most: it is
    unusual when it does what no group does."""
    groups: dict[Hashable, list[float]] = {}
    for name, value in zip(peers, moved.tolist(), strict=True):
        if value > 0 and math.isfinite(value):
            groups.setdefault(name, []).append(value)
    medians = {name: float(np.median(values)) for name, values in groups.items() if len(values) >= _LEAST_PEERS}
    typical = float(typical_movement(moved))
    alone = max(medians.values(), default=typical)
    usual = usual_movement(np.array([medians.get(name, alone) for name in peers], np.float64), typical)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.equal(moved, 0), 0.0, moved / usual)


_LEAST_PEERS: Final = 3


def cosine(dot: Sums, before_squares: Sums, after_squares: Sums) -> Floats:
    """Return the cosine of the angle between before and after: `dot / (|before| |after|)`, from -1 to 1; NaN where
    either is zero or empty.

    The roots are multiplied, not the squares: the product of the squares of two small tensors underflows."""
    return np.clip(_ratio(dot, norm(before_squares) * norm(after_squares)), -1.0, 1.0)


def dot_of_squares(update_squares: Sums, before_squares: Sums, after_squares: Sums) -> Sums:
    """Return the products `before * after` summed, from the squares alone, by the law of cosines:
    `|a - b|^2 = |a|^2 + |b|^2 - 2 a.b`."""
    return (before_squares + after_squares - update_squares) / 2


def changed_share(changed: Sums, numel: Sums) -> Floats:
    """Return the share of elements whose value changed: `changed / numel`, from 0 to 1; 0 for an empty tensor, nothing
    of which can change. A NaN that stays NaN has not changed, and neither has a zero that changes its sign."""
    share: Floats = changed / np.maximum(numel, 1)
    return share


def known(value: Sums) -> float | None:
    """Return one figure as rows have it: None where it is NaN."""
    number = float(value)
    return None if math.isnan(number) else number


def _ratio(above: Sums, below: Sums) -> Floats:
    with np.errstate(invalid="ignore", over="ignore"):
        ratio: Floats = above / np.where(np.equal(below, 0), np.nan, below)
    return ratio


def _part(values: Floats) -> Floats:
    return values


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure by its name: `value` computes it from arrays of `parts`, in that order.

    `is_update` is true for a figure about the way from the checkpoint before; the others are about one checkpoint
    alone."""

    parts: tuple[str, ...]
    value: Callable[..., Floats]
    is_update: bool = False


_ALL: Final[Mapping[str, Metric]] = {
    "norm": Metric(("squares",), norm),
    "nonfinite": Metric(("nonfinite",), _part),
    "nan": Metric(("nan",), _part),
    "inf": Metric(("inf",), _part),
    "zeros": Metric(("zeros", "numel"), zeros_share),
    "mean": Metric(("sum", "finite"), mean),
    "std": Metric(("squares", "sum", "finite"), std),
    "rms": Metric(("squares", "finite"), rms),
    "min": Metric(("least",), minimum),
    "max": Metric(("most",), maximum),
    "relative_update": Metric(("update_squares", "before_squares"), relative_update, is_update=True),
    "update_norm": Metric(("update_squares",), norm, is_update=True),
    "cosine": Metric(("dot", "before_squares", "squares"), cosine, is_update=True),
    "max_change": Metric(("max_change",), _part, is_update=True),
    "changed_share": Metric(("changed", "numel"), changed_share, is_update=True),
    "sign_flips": Metric(("sign_flips",), _part, is_update=True),
}
_ALIASES: Final = {"update_ratio": "relative_update"}
"""Another name that is common in the field -> the name here."""

METRICS: Final = (*_ALL, *_ALIASES)
UPDATE_METRICS: Final = tuple(name for name, metric in _ALL.items() if metric.is_update)

_MERGES: Final[Mapping[str, tuple[np.ufunc, float]]] = {
    "least": (np.minimum, math.inf),
    "most": (np.maximum, -math.inf),
    "max_change": (np.maximum, 0.0),
}
"""The parts that do not add up -> how those of several tensors merge, and the neutral element."""


def metric_named(name: str) -> Metric:
    """Return the metric of that name. Raises NotFoundError, which lists the metrics, for an unknown name."""
    metric = _ALL.get(_ALIASES.get(name, name))
    if metric is None:
        raise NotFoundError(f"no metric {name!r}; the metrics are {', '.join(METRICS)}")
    return metric


def merged(part: str, values: Floats, present: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64]) -> Floats:
    """Merge one part of several tensors into that of their groups: (tensors, checkpoints) -> (groups, checkpoints).

    `groups` has the number of each tensor's group, from 0 on without gaps. Only tensors that are `present` count. The
    result is NaN where a present tensor's part is unknown, or where none is present."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(groups.max() + 1))
    merge, neutral = _MERGES.get(part, (np.add, 0.0))
    result: Floats = merge.reduceat(np.where(present, values, neutral)[order], starts, axis=0)
    result[~np.logical_or.reduceat(present[order], starts, axis=0)] = math.nan
    return result
