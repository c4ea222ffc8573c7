"""A policy: from the words of a user, as "last 20, every 1000, best 3 by loss, 50GB", to rules and a byte budget."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from catalog.errors import SetupError
from catalog.retention.rules import Best, EverySteps, EveryTime, Last, Rule, Tagged, Thinned

__all__ = ["Budget", "Keep", "Policy", "policy_of"]

GRAMMAR = (
    "a policy is a list of these, with commas between them: 'last 20', 'every 1000' (steps), 'every 30m' (s, m, h, d), "
    "'best 3 by loss', 'best 3 by accuracy max', 'one per 1h for 2d' (thinning with age), 'tagged', '50GB' (a budget)"
)
_NUMBER = r"([0-9]+)"
_WORDS = (
    "last",
    "every",
    "best",
    "one",
    "per",
    "for",
    "tagged",
    "by",
    "max",
    "min",
    "steps",
    "minutes",
    "hours",
    "days",
)
_SECONDS = {
    word: seconds
    for seconds, words in ((1.0, "s sec second"), (60.0, "m min minute"), (3600.0, "h hour"), (86_400.0, "d day"))
    for word in (*words.split(), *(f"{word}s" for word in words.split() if len(word) > 1))
}
_DURATION = rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(sorted(_SECONDS, key=len, reverse=True))})"
_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True)
class Budget:
    """The most bytes that the runs of a policy may take on the disk, as the file system counts them."""

    nbytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.nbytes, int) or isinstance(self.nbytes, bool) or self.nbytes < 1:
            raise SetupError(f"keep: a budget of {self.nbytes!r} bytes: give a whole number, 1 or more")

    def __str__(self) -> str:
        unit = next(unit for unit in ("TB", "GB", "MB", "kB", "B") if self.nbytes % _BYTES[unit.lower()] == 0)
        return f"{self.nbytes // _BYTES[unit.lower()]}{unit}"


@dataclass(frozen=True, slots=True)
class Policy:
    """Whatever one of `rules` keeps is kept, as far as the budget reaches; without rules, all that fits is kept.

    The rules are in the order of their value: where the budget does not reach, the last rule gives way first.
    """

    rules: tuple[Rule, ...]
    budget_bytes: int | None = None

    def __str__(self) -> str:
        budget = [] if self.budget_bytes is None else [Budget(self.budget_bytes)]
        return ", ".join(map(str, [*self.rules, *budget]))


Keep: TypeAlias = str | Policy | Rule | Budget | Sequence[Rule | Budget | str]
"""A user gives a policy in one of these forms."""


def policy_of(keep: Keep) -> Policy:
    """Return the policy that a user means: by words, as rules, or both in a list. SetupError, with the grammar, for
    words that mean none, for an empty policy, and for one with two budgets."""
    if isinstance(keep, Policy):
        return keep
    parts: list[Rule | Budget] = []
    for one in [keep] if isinstance(keep, (str, Rule, Budget)) else _listed(keep):
        if isinstance(one, str):
            parts += [_part(text) for text in _texts(one)]
        elif isinstance(one, (Rule, Budget)) and not isinstance(one, type):
            parts.append(one)
        else:
            raise SetupError(f"keep={one!r}: is no rule; {GRAMMAR}")
    rules = tuple(part for part in parts if not isinstance(part, Budget))
    budgets = [part for part in parts if isinstance(part, Budget)]
    if not parts:
        raise SetupError(f"keep={keep!r}: an empty policy would remove everything; {GRAMMAR}")
    if len(budgets) > 1:
        raise SetupError(f"keep={keep!r}: has {len(budgets)} budgets, {' and '.join(map(str, budgets))}: give one")
    return Policy(tuple(dict.fromkeys(rules)), budgets[0].nbytes if budgets else None)


def _listed(keep: object) -> list[object]:
    if not isinstance(keep, Sequence):
        raise SetupError(f"keep={keep!r}: is of type {type(keep).__qualname__}; {GRAMMAR}")
    return list(keep)


def _texts(keep: str) -> list[str]:
    texts = [" ".join(text.split()).lower() if "by" not in text else " ".join(text.split()) for text in keep.split(",")]
    if "" in texts and any(texts):
        raise SetupError(f"keep={keep!r}: has a comma with nothing beside it; {GRAMMAR}")
    return [text for text in texts if text]


def _part(text: str) -> Rule | Budget:
    if text == "tagged":
        return Tagged()
    if found := re.fullmatch(rf"last {_NUMBER}", text):
        return Last(int(found[1]))
    if found := re.fullmatch(rf"every {_NUMBER}(?: steps?)?", text):
        return EverySteps(int(found[1]))
    if found := re.fullmatch(rf"every {_DURATION}", text):
        return EveryTime(_seconds(found[1], found[2]))
    if found := re.fullmatch(rf"(?:one|1) per {_DURATION} for {_DURATION}", text):
        return Thinned(_seconds(found[1], found[2]), _seconds(found[3], found[4]))
    if found := re.fullmatch(rf"best(?: {_NUMBER})? by (\S+)(?: (min|max))?", text):
        return Best(int(found[1] or 1), found[2], largest=found[3] == "max")
    if (found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]+)", text.lower())) and found[2] in _BYTES:
        return Budget(int(float(found[1]) * _BYTES[found[2]]))
    raise SetupError(f"keep: {text!r} is no rule{_nearest(text)}; {GRAMMAR}")


def _seconds(number: str, unit: str) -> float:
    return float(number) * _SECONDS[unit]


def _nearest(text: str) -> str:
    """Return a guess at what was meant, from the words of the text that no rule has."""
    known = {*_WORDS, *_SECONDS, *_BYTES}
    guesses = [
        f"{close[0]!r} for {word!r}"
        for word in re.findall(r"[a-z]+", text.lower())
        if word not in known and (close := difflib.get_close_matches(word, _WORDS, n=1))
    ]
    return f" (perhaps {', '.join(guesses)})" if guesses else ""
