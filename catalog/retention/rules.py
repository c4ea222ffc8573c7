"""The rules of a policy: each names checkpoints that are worth keeping, the most valuable one first.

A rule sees the checkpoints of one training in the order in which they were made. It is a pure function of them, so
whoever asks again gets the same answer; ages count from the newest checkpoint, not from today, so that a finished
training does not decay. Where one of many is kept, it is the earliest of its interval, and intervals begin at fixed
times and steps: pruning again and again keeps the same ones.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from catalog.errors import SetupError
from catalog.retention.facts import CheckpointFacts

__all__ = ["Best", "EverySteps", "EveryTime", "Last", "Rule", "Tagged", "Thinned", "duration_text"]


@runtime_checkable
class Rule(Protocol):
    """One rule of a policy; `str()` gives the words that make it."""

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        """Return those of a training's checkpoints that this rule keeps, the most valuable one first. `line` has only
        whole checkpoints, in the order in which they were made."""
        ...


@dataclass(frozen=True, slots=True)
class Last:
    """The last `count` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        _require_whole("last", self.count)

    def __str__(self) -> str:
        return f"last {self.count}"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        return list(reversed(line[-self.count :]))


@dataclass(frozen=True, slots=True)
class EverySteps:
    """The checkpoints whose step is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _require_whole("every", self.steps)

    def __str__(self) -> str:
        return f"every {self.steps}"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        return [one for one in reversed(line) if one.ref.step % self.steps == 0]


@dataclass(frozen=True, slots=True)
class EveryTime:
    """The first checkpoint of every interval of so many seconds; intervals are counted from 1970, in UTC."""

    seconds: float

    def __post_init__(self) -> None:
        _require_duration("every", self.seconds)

    def __str__(self) -> str:
        return f"every {duration_text(self.seconds)}"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        return _first_of_each([(one.created_s // self.seconds, one) for one in line])


@dataclass(frozen=True, slots=True)
class Thinned:
    """The first checkpoint of every interval of `per_s` seconds, as long as it is at most `span_s` seconds older than
    the newest checkpoint."""

    per_s: float
    span_s: float

    def __post_init__(self) -> None:
        _require_duration("one per", self.per_s)
        _require_duration("for", self.span_s)

    def __str__(self) -> str:
        return f"one per {duration_text(self.per_s)} for {duration_text(self.span_s)}"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        newest_s = max((one.created_s for one in line), default=0.0)
        return _first_of_each(
            [(one.created_s // self.per_s, one) for one in line if newest_s - one.created_s <= self.span_s]
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The `count` checkpoints with the smallest value of a metric, or the largest; without those whose value is
    unknown, and those with values that are not finite."""

    count: int
    metric: str
    largest: bool = False

    def __post_init__(self) -> None:
        _require_whole("best", self.count)
        if not isinstance(self.metric, str) or not self.metric:
            raise SetupError(f"keep: best {self.count} by {self.metric!r}: name a metric, as in 'best 3 by loss'")

    def __str__(self) -> str:
        return f"best {self.count} by {self.metric}{' max' if self.largest else ''}"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        known = [
            one for one in line if one.healthy is not False and math.isfinite(one.metrics.get(self.metric, math.nan))
        ]
        sign = -1 if self.largest else 1
        return sorted(known, key=lambda one: (sign * one.metrics[self.metric], one.ref.step))[: self.count]


@dataclass(frozen=True, slots=True)
class Tagged:
    """The checkpoints that have a tag. These are never removed by a policy, whether it says so or not."""

    def __str__(self) -> str:
        return "tagged"

    def keeps(self, line: Sequence[CheckpointFacts]) -> Sequence[CheckpointFacts]:
        return [one for one in reversed(line) if one.tags]


def _first_of_each(numbered: Sequence[tuple[Hashable, CheckpointFacts]]) -> list[CheckpointFacts]:
    first: dict[Hashable, CheckpointFacts] = {}
    for interval, one in numbered:
        first.setdefault(interval, one)
    return list(reversed(first.values()))


_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "m"), (1.0, "s"))


def duration_text(seconds: float) -> str:
    """Return a duration in the words of a policy: 30m, 2h, 1d."""
    unit_s, unit = next(((size, unit) for size, unit in _UNITS if seconds % size == 0), (1.0, "s"))
    return f"{seconds / unit_s:g}{unit}"


def _require_whole(word: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SetupError(f"keep: {word} {value!r}: give a whole number, 1 or more")


def _require_duration(word: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise SetupError(f"keep: {word} {seconds!r}: give a number of seconds above 0")
