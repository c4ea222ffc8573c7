"""The arithmetic of a diff: two tensors compared chunk by chunk in float64, exact up to float64 rounding.

Norms, dot products and the largest change are over the elements that are finite on both sides, and unknown where there
is none. Elements that are not finite are counted on either side. An element counts as changed when its value differs:
NaN equals NaN here, and -0 equals 0. Squares of float64 values beyond 1e154 overflow to infinity and products below
1e-308 vanish; every other dtype is far from both.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from dshistory import metrics

__all__ = ["CHUNK_NUMEL", "Comparison"]

CHUNK_NUMEL = 1 << 15
"""Few enough that a chunk stays in a core's cache and that torch works on it in the calling thread alone, so a diff
beside a training takes one core."""

_COUNTED: Final = frozenset({"changed_share", "nonfinite_before", "nonfinite_after"})
"""Figures that are known also where no element is finite on both sides."""


@dataclass(slots=True)
class Comparison:
    """The sums over pairs of chunks, and as properties the figures of a diff's row (see `dshistory.metrics`)."""

    numel: int = 0
    finite: int = 0
    changed: int = 0
    sign_flips: int = 0
    nonfinite_before: int = 0
    nonfinite_after: int = 0
    max_change: float = 0.0
    before_squares: float = 0.0
    after_squares: float = 0.0
    update_squares: float = 0.0
    dot: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add two flat tensors of equal length and of any real dtypes; works on CHUNK_NUMEL elements at a time, in
        float64."""
        for low in range(0, before.numel(), CHUNK_NUMEL):
            self._add_chunk(before[low : low + CHUNK_NUMEL], after[low : low + CHUNK_NUMEL])

    @property
    def norm_before(self) -> float:
        return float(metrics.norm(self.before_squares))

    @property
    def norm_after(self) -> float:
        return float(metrics.norm(self.after_squares))

    @property
    def update_norm(self) -> float:
        return float(metrics.norm(self.update_squares))

    @property
    def relative_update(self) -> float:
        return float(metrics.relative_update(self.update_squares, self.before_squares))

    @property
    def cosine(self) -> float | None:
        return metrics.known(metrics.cosine(self.dot, self.before_squares, self.after_squares))

    @property
    def changed_share(self) -> float:
        return float(metrics.changed_share(self.changed, self.numel))

    def figure(self, name: str) -> float | int | None:
        """Return a figure by its name; None (unknown) where no element is finite on both sides, unless it is a count of
        elements."""
        if self.numel and not self.finite and name not in _COUNTED:
            return None
        value: float | int | None = getattr(self, name)
        return value

    def _add_chunk(self, stored_before: torch.Tensor, stored_after: torch.Tensor) -> None:
        before, after = stored_before.double(), stored_after.double()
        self.numel += before.numel()
        before_squares, after_squares = float(before.square().sum()), float(after.square().sum())
        if not math.isfinite(before_squares + after_squares):
            before, after = self._finite_part(before, after)
            before_squares, after_squares = float(before.square().sum()), float(after.square().sum())
        self.finite += before.numel()
        self.before_squares += before_squares
        self.after_squares += after_squares
        if stored_before.dtype == stored_after.dtype == torch.int64:
            update = _int64_update(stored_before, stored_after)
        else:
            update = after - before
        self.changed += int(update.count_nonzero())
        if update.numel():
            lowest, highest = update.aminmax()
            self.max_change = max(self.max_change, -float(lowest), float(highest))
        self.update_squares += float(update.square_().sum())
        products = before * after
        self.dot += float(products.sum())
        self.sign_flips += int((products < 0).count_nonzero())

    def _finite_part(self, before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        finite_before, finite_after = before.isfinite(), after.isfinite()
        self.nonfinite_before += before.numel() - int(finite_before.count_nonzero())
        self.nonfinite_after += after.numel() - int(finite_after.count_nonzero())
        both = finite_before & finite_after
        same = (before == after) | (before.isnan() & after.isnan())
        self.changed += int((~both & ~same).count_nonzero())
        return before[both], after[both]


def _int64_update(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return after - before in float64, rounded once.

    float64 cannot hold every int64 value, but it holds the high and low halves of both and their differences
    exactly."""
    high = (after >> 32).double() - (before >> 32).double()
    low = (after & 0xFFFFFFFF).double() - (before & 0xFFFFFFFF).double()
    return high * 2.0**32 + low
