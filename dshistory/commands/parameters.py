"""The parameters of a verb as text can give them: for the command line, the magics and their completion.

A parameter that only Python can pass (an engine, a model) has an annotation that is not listed here, and text cannot
give it. Help texts are the lines of the docstring's `Args:` section.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from catalog.errors import HistoryError
from catalog.retention.policy import Keep
from dshistory.options import Changes, Choices, Command, Predicate, Ref, SkippedSteps, Steps
from dshistory.patterns import Patterns
from dshistory.registry import Verb

__all__ = ["Parameter", "UsageError", "parameters"]

_WHOLE_NUMBER: Final = re.compile(r"[+-]?\d+")
_TEXTUAL: Final = (
    Ref,
    str,
    str | None,
    int,
    int | None,
    float,
    bool,
    Patterns,
    Patterns | None,
    Ref | None,
    Steps,
    Steps | None,
    Keep,
    float | None,
    Sequence[float] | None,
    Predicate,
    Changes,
    Command,
    SkippedSteps,
    Path | str,
    Path | str | None,
    object,
)
"""The annotations whose values text can give; with `Choices`, a parameter names its words itself."""


class UsageError(HistoryError, ValueError):
    """An argument is missing, superfluous or not understood."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a verb, with its text for help."""

    empty: ClassVar[Any] = inspect.Parameter.empty
    """The default of a parameter that has none."""

    name: str
    positional: bool
    annotation: Any
    default: Any
    help: str

    @property
    def required(self) -> bool:
        """True when the parameter has no default."""
        return self.default is self.empty and not self.named_values

    @property
    def asks_first(self) -> bool:
        """True when it says whether a verb only tells what it would remove. As text a verb does no more than that,
        unless
        the option `--yes` is given."""
        return self.name == "dry_run"

    @property
    def option(self) -> str:
        """The option's name; a flag that is on by default is named by what switches it off, `--no-verify`."""
        if self.asks_first:
            return "--yes"
        return f"--{'no-' if self.default is True else ''}{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the value may be; empty when any value may be given."""
        kept = getattr(self.annotation, "__metadata__", ())
        return next((mark.words for mark in kept if isinstance(mark, Choices)), ())

    @property
    def flag(self) -> bool:
        """True when the option takes no value."""
        return bool(self.annotation is bool)

    @property
    def numeric(self) -> bool:
        """True when the value is a whole number."""
        return self.annotation in (int, int | None)

    @property
    def repeatable(self) -> bool:
        """True when the option may be given several times."""
        return self.annotation in (Patterns, Patterns | None, Changes, SkippedSteps)

    @property
    def placeholder(self) -> str | None:
        """The placeholder of the option's value in help; None for its name."""
        if self.named_values or self.annotation is Changes:
            return "NAME=VALUE"
        if self.annotation is SkippedSteps:
            return "STEP"
        return "PATTERN" if self.repeatable else "N" if self.numeric else None

    @property
    def takes_rest(self) -> bool:
        """True when the value is all that stands behind `--`."""
        return self.annotation is Command

    @property
    def named_values(self) -> bool:
        """True when the option takes NAME=VALUE, several times, for keyword arguments."""
        return self.annotation is object

    def parse(self, text: str) -> Any:
        """Return the value that the text stands for. Raises UsageError when it stands for none."""
        if self.numeric:
            if not _WHOLE_NUMBER.fullmatch(text):
                raise UsageError(f"{self.name} must be a whole number, not {text!r}")
            return int(text)
        if self.annotation in (float, float | None):
            return _number(text, self.name)
        if self.annotation == Sequence[float] | None:
            return [_number(part, self.name) for part in text.split(",")]
        if self.annotation in (
            Ref,
            Ref | None,
            Steps,
            Steps | None,
            Path | str | None,
            object,
        ) and _WHOLE_NUMBER.fullmatch(text):
            return int(text)
        if self.choices and text not in self.choices:
            raise UsageError(f"{self.option} is one of {', '.join(self.choices)}, not {text!r}")
        return text


@cache
def parameters(verb: Verb) -> tuple[Parameter, ...]:
    """Return the parameters of the verb that text can give, in the order of its signature."""
    helps = _argument_helps(verb.docstring)
    known = [
        Parameter(p.name, p.kind is p.POSITIONAL_OR_KEYWORD, p.annotation, p.default, helps.get(p.name, ""))
        for p in verb.signature.parameters.values()
    ]
    return tuple(p for p in known if p.annotation in _TEXTUAL or p.choices)


def _argument_helps(docstring: str) -> dict[str, str]:
    """Return the texts of the `Args:` section by name, with continuation lines joined."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {text!r}") from error
