"""The arithmetic of a diff: two tensors compared chunk by chunk in float64, exact up to float64 rounding.

Norms, dot products and the largest change are over the elements that are finite on both sides, and unknown where there
is none; what is not finite is counted on either side, and an element counts as changed when its value differs (NaN equals NaN here, and -0 equals 0).
Squares of F64 values beyond 1e154 overflow to infinity and products below 1e-308 vanish; every other dtype is far
from it.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["CHUNK_NUMEL", "Comparison"]

CHUNK_NUMEL = 1 << 15
"""Few enough to stay in a core's cache, and to be worked on by this thread alone: a diff beside a training takes one
core."""

_COUNTED: Final = frozenset({"changed_share", "nonfinite_before", "nonfinite_after"})


@dataclass(slots=True)
class Comparison:
    """Running sums over pairs of chunks; the numbers of a diff's row are its properties."""

    numel: int = 0
    finite: int = 0
    changed: int = 0
    sign_flips: int = 0
    nonfinite_before: int = 0
    nonfinite_after: int = 0
    max_change: float = 0.0
    squares_before: float = 0.0
    squares_after: float = 0.0
    squares_update: float = 0.0
    dot: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Take in two flat tensors of equal length, of any real dtypes, in pieces of CHUNK_NUMEL elements as
        float64."""
        for low in range(0, before.numel(), CHUNK_NUMEL):
            self._add_chunk(before[low : low + CHUNK_NUMEL], after[low : low + CHUNK_NUMEL])

    @property
    def norm_before(self) -> float:
        return math.sqrt(self.squares_before)

    @property
    def norm_after(self) -> float:
        return math.sqrt(self.squares_after)

    @property
    def update_norm(self) -> float:
        return math.sqrt(self.squares_update)

    @property
    def relative_update(self) -> float:
        """Update norm by norm before; infinite when something came out of zero, 0 when nothing moved."""
        if self.squares_update == 0:
            return 0.0
        return self.update_norm / self.norm_before if self.squares_before else math.inf

    @property
    def cosine(self) -> float | None:
        """Between before and after; unknown (None) when either is zero."""
        if not (self.squares_before and self.squares_after):
            return None
        return max(-1.0, min(1.0, self.dot / (self.norm_before * self.norm_after)))

    @property
    def changed_share(self) -> float:
        return self.changed / self.numel if self.numel else 0.0

    def number(self, name: str) -> float | int | None:
        """One of the numbers above; unknown (None) where no element is finite on both sides, but for what is counted."""
        if self.numel and not self.finite and name not in _COUNTED:
            return None
        value: float | int | None = getattr(self, name)
        return value

    def _add_chunk(self, stored_before: torch.Tensor, stored_after: torch.Tensor) -> None:
        before, after = stored_before.double(), stored_after.double()
        self.numel += before.numel()
        squares_before, squares_after = float(before.square().sum()), float(after.square().sum())
        if not math.isfinite(squares_before + squares_after):
            before, after = self._finite_part(before, after)
            squares_before, squares_after = float(before.square().sum()), float(after.square().sum())
        self.finite += before.numel()
        self.squares_before += squares_before
        self.squares_after += squares_after
        if stored_before.dtype == stored_after.dtype == torch.int64:
            update = _int64_update(stored_before, stored_after)
        else:
            update = after - before
        self.changed += int(update.count_nonzero())
        if update.numel():
            lowest, highest = update.aminmax()
            self.max_change = max(self.max_change, -float(lowest), float(highest))
        self.squares_update += float(update.square_().sum())
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
    """after - before in float64, rounded once: whole int64 values don't fit float64, their halves and the halves'
    differences do."""
    high = (after >> 32).double() - (before >> 32).double()
    low = (after & 0xFFFFFFFF).double() - (before & 0xFFFFFFFF).double()
    return high * 2.0**32 + low
