"""The colour scale of a heat map: linear, or logarithmic where the values are far apart, zero below all others."""

import math
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["Scale"]

_FAR_APART: Final = 30.0
"""The ratio of the largest to the smallest positive value above which the scale is logarithmic."""


class Scale:
    """The scale of some values; `scale(value)` is the number to colour, from `low` for the `least` to `high` for the
    `most`.

    Infinite values do not stretch the scale: they get the colour of `most`."""

    def __init__(self, values: Sequence[Sequence[float | None]]) -> None:
        known = [value for line in values for value in line if value is not None and math.isfinite(value)]
        positive = [value for value in known if value > 0]
        self.least, self.most = min(known, default=0.0), max(known, default=0.0)
        self._smallest = min(positive, default=1.0)
        self.logarithmic = bool(positive) and self.least >= 0 and self.most > _FAR_APART * self._smallest
        self.low = self(self.least)
        self.high = self(self.most)

    def __call__(self, value: float) -> float:
        value = min(value, self.most)
        if not self.logarithmic:
            return value
        return math.log10(value) if value > 0 else math.log10(self._smallest) - 1

    def share(self, value: float) -> float:
        """Return the position of a value between the lowest and the highest, from 0 to 1."""
        return (self(value) - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def ticks(self) -> dict[str, Any]:
        """Return plotly's tick options of a colour bar."""
        if not self.logarithmic:
            return {"tickvals": None, "ticktext": None}
        powers = range(math.ceil(math.log10(self._smallest)), math.floor(self.high) + 1)
        return {"tickvals": list(powers), "ticktext": [f"10<sup>{power}</sup>" for power in powers]}
