"""From values to colours: they themselves, or, where they are far apart, their powers of ten, with zero below all of them."""

import math
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["Scale"]

_FAR_APART: Final = 30.0


class Scale:
    """The scale of some values, infinite ones left out; `scale(value)` is what is coloured, from `low` for the `least` to `high` for the
    `most`; infinite values stand there too."""

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
        """Where the value is between the lowest and the highest, from 0 to 1."""
        return (self(value) - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def ticks(self) -> dict[str, Any]:
        """What is written beside a colour bar."""
        if not self.logarithmic:
            return {"tickvals": None, "ticktext": None}
        powers = range(math.ceil(math.log10(self._smallest)), math.floor(self.high) + 1)
        return {"tickvals": list(powers), "ticktext": [f"10<sup>{power}</sup>" for power in powers]}
