"""The colour scale of a heat map, and what it draws: logarithmic where the values are far apart, zero below all others.

A cosine is drawn as its distance from 1, for the cosines of a training differ in their last digits only. Values
relative to their own past have a scale of their own: its middle is 1, and it is logarithmic and symmetric.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["RELATIVE_COLOURS", "Picture", "Scale", "drawn", "drawn_name"]

_FAR_APART: Final = 30.0
"""The ratio of the largest to the smallest positive value above which the scale is logarithmic."""
_MOST_TICKS: Final = 6
_LEAST_SPAN: Final = math.log10(2)
"""The scale of relative values goes at least from half to double."""

RELATIVE_COLOURS: Final = [[0.0, "#0072B2"], [0.35, "#9CC3DC"], [0.5, "#EFEFEF"], [0.65, "#F0B58C"], [1.0, "#D55E00"]]
"""From much less than usual, blue, over the usual to much more, vermilion: colours that everybody can distinguish."""


def drawn(metric: str, value: float) -> float:
    """Return the number that a figure shows for a value of the metric."""
    return max(0.0, 1.0 - value) if metric == "cosine" else value


def drawn_name(metric: str) -> str:
    """Return what a figure calls that number."""
    return "1 − cosine" if metric == "cosine" else metric


class Scale:
    """The scale of some values; `scale(value)` is the number to colour, from `low` for the `least` to `high` for the
    `most`.

    Infinite values do not stretch the scale: they get the colour of `most`. The scale is logarithmic on request, or
    where the values are far apart. A `relative` scale is, and reaches as far below 1 as above it."""

    def __init__(
        self, values: Sequence[Sequence[float | None]], *, relative: bool = False, logarithmic: bool = False
    ) -> None:
        known = [value for line in values for value in line if value is not None and math.isfinite(value)]
        positive = [value for value in known if value > 0]
        self.least, self.most = min(known, default=0.0), max(known, default=0.0)
        self._smallest = min(positive, default=1.0)
        self._lowest_known = math.log10(self._smallest)
        self.logarithmic = bool(positive) and (
            relative or logarithmic or (self.least >= 0 and self.most > _FAR_APART * self._smallest)
        )
        self.low, self.high = self(self.least), self(self.most)
        if relative and positive:
            reach = max(_LEAST_SPAN, abs(math.log10(self._smallest)), abs(self.high))
            self.low = self._lowest_known = -reach
            self.high = reach

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
        powers = range(math.ceil(self._lowest_known), math.floor(self.high) + 1)
        apart = -(-len(powers) // _MOST_TICKS)
        shown = [power for power in powers if power % apart == 0]
        if len(shown) > 1:
            return {"tickvals": shown, "ticktext": [f"10<sup>{power}</sup>" for power in shown]}
        # Where less than two powers of ten lie between the ends, the ends themselves say more.
        ends = [self._lowest_known, self.high]
        return {"tickvals": ends, "ticktext": [f"{10**end:.2g}" for end in ends]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A heat map shows a number, or None, for each line and each step, what it is, and its colours.

    `since` is the step from which a column counts, None where it is about its step alone. `relative` is true for
    numbers that are relative to those before."""

    steps: list[int]
    since: list[int | None]
    lines: list[str]
    values: list[list[float | None]]
    name: str
    scale: Scale
    relative: bool = False
