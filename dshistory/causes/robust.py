"""How surprising a value is beside its neighbours in time, by medians, which one outlier does not move.

    surprise = |x - median of the values around| / (1.4826 * median of such distances)

So the unit is the standard deviation of a normal distribution. In a long series of normal noise none exceeds 5; the
noise of gradients has heavier tails.
"""

from typing import Final

import numpy as np

from dshistory.metrics import AS_NORMAL, Floats

__all__ = ["CLEAR", "CLEAR_LOSS", "CLEAR_OF_MANY", "SEEN", "excess", "log", "middle"]

CLEAR: Final = 8.0
"""From here on a surprise is reported: by Chebyshev's inequality at most one value in 64 of any distribution is as far
out, and of a normal one none."""

CLEAR_OF_MANY: Final = 5.0
"""The same of sums and medians over many weights, which have nearly normal noise."""

CLEAR_LOSS: Final = 6.0
"""The same of a loss: it is the mean over a batch, so its noise is nearly normal."""

SEEN: Final = 3.0
"""A surprise that says something only where another one is clear."""

_AROUND: Final = 5
_NEAR: Final = 15
_LEAST: Final = 6
"""Fewer values than this give no notion of what is usual."""


def excess(values: Floats, *, least: float, at_once: bool = False) -> Floats:
    """Return how far each value (along the last axis) lies above (or below, negative) the median of up to five values
    before and after it, in standard deviations; 0 where it is unknown. `least`: the smallest deviation that counts as
    one, so that a series that hardly moves is not judged by its rounding. `at_once`: count only how far it lies beyond
    the value right before and the one right after it, so that a series that drifts is not judged by its drift."""
    far = np.zeros_like(values)
    if values.shape[-1] < _LEAST:
        return far
    for place in range(values.shape[-1]):
        around = [at for at in range(place - _AROUND, place + _AROUND + 1) if at != place]
        around = [at for at in around if 0 <= at < values.shape[-1]]
        with np.errstate(invalid="ignore"):
            far[..., place] = values[..., place] - middle(values[..., around])
    distances, count = np.abs(far), values.shape[-1]
    whole = middle(distances)
    near = [middle(distances[..., max(0, at - _NEAR) : at + _NEAR + 1]) for at in range(count)]
    spread = np.maximum(AS_NORMAL * np.maximum(np.stack(near, axis=-1), whole[..., np.newaxis]), least)
    if at_once:
        unknown = np.full_like(values[..., :1], np.nan)
        before = np.concatenate([unknown, values[..., :-1]], axis=-1)
        after = np.concatenate([values[..., 1:], unknown], axis=-1)
        above = np.fmax(values - np.fmax(before, after), 0.0)
        below = np.fmin(values - np.fmin(before, after), 0.0)
        far = np.where(far > 0, np.fmin(far, above), np.fmax(far, below))
    return np.nan_to_num(far / spread, nan=0.0, posinf=np.inf, neginf=-np.inf)


def log(values: Floats) -> Floats:
    """Return the logarithm of what is above 0, NaN of the rest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)


def middle(values: Floats) -> Floats:
    """Return the lower median of the known values along the last axis; NaN where none is known."""
    known = np.isfinite(values)
    ordered = np.sort(np.where(known, values, np.inf), axis=-1)
    place = np.maximum(known.sum(axis=-1, keepdims=True) - 1, 0) // 2
    found: Floats = np.take_along_axis(ordered, place, axis=-1)[..., 0]
    return np.where(np.isinf(found), np.nan, found)
