"""The verbs of the explorer, registered once: the command line and the magics are made from these functions.

A verb's arguments are its function's parameters: positional ones are arguments, keyword-only ones options, `**params`
is `--params NAME=VALUE`. A parameter that only Python can pass (an engine, a model) has an annotation that is none of
ours, and is left out. Help texts are the docstrings: the first paragraph, and the lines of the `Args:` section.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from catalog.errors import HistoryError
from dshistory import current
from dshistory.commands import doctor
from dshistory.conversion.importing import import_checkpoint
from dshistory.explorer import Explorer
from dshistory.options import Choices
from dshistory.over_time import Predicate, Ref
from dshistory.patterns import Patterns, nearest

__all__ = ["VERBS", "Parameter", "Surface", "UsageError", "Verb", "verb_named"]

Surface = Literal["command line", "magic"]


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
    Predicate,
    Path | str,
    Path | str | None,
    object,
)


class UsageError(HistoryError, ValueError):
    """An argument that is missing, too many or not understood."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a verb as text can give it."""

    empty: ClassVar[Any] = inspect.Parameter.empty
    """The default of a parameter that has none."""

    name: str
    positional: bool
    annotation: Any
    default: Any
    help: str

    @property
    def required(self) -> bool:
        return self.default is self.empty and not self.named_values

    @property
    def option(self) -> str:
        """As it is written when it is no positional argument; what is on is switched off."""
        return f"--{'no-' if self.default is True else ''}{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; none when it may be any."""
        kept = getattr(self.annotation, "__metadata__", ())
        return next((mark.words for mark in kept if isinstance(mark, Choices)), ())

    @property
    def flag(self) -> bool:
        """Given without a value."""
        return bool(self.annotation is bool)

    @property
    def numeric(self) -> bool:
        """Is a whole number."""
        return self.annotation in (int, int | None)

    @property
    def repeatable(self) -> bool:
        """May be given several times."""
        return self.annotation in (Patterns, Patterns | None)

    @property
    def named_values(self) -> bool:
        """Takes NAME=VALUE, several times, and becomes keyword arguments."""
        return self.annotation is object

    def parse(self, text: str) -> Any:
        """The value that the text stands for. Raises UsageError."""
        if self.numeric:
            if not _WHOLE_NUMBER.fullmatch(text):
                raise UsageError(f"{self.name} must be a whole number, not {text!r}")
            return int(text)
        if self.annotation is float:
            return _number(text, self.name)
        if self.annotation in (Ref, Ref | None, Path | str | None, object) and _WHOLE_NUMBER.fullmatch(text):
            return int(text)
        if self.choices and text not in self.choices:
            raise UsageError(f"{self.option} is one of {', '.join(self.choices)}, not {text!r}")
        return text


@dataclass(frozen=True)
class Verb:
    """One thing the explorer does; `function` takes the history first unless `needs_history` is False."""

    name: str
    function: Callable[..., Any]
    examples: tuple[str, ...]
    surfaces: tuple[Surface, ...] = ("command line", "magic")
    needs_history: bool = True

    @cached_property
    def summary(self) -> str:
        """The first paragraph of the docstring."""
        return _docstring(self.function).split("\n\n")[0].replace("\n", " ")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """What text can give, in order."""
        helps = _argument_helps(self.function)
        listed = list(inspect.signature(self.function).parameters.values())[1 if self.needs_history else 0 :]
        known = [
            Parameter(p.name, p.kind is p.POSITIONAL_OR_KEYWORD, p.annotation, p.default, helps.get(p.name, ""))
            for p in listed
        ]
        return tuple(p for p in known if p.annotation in _TEXTUAL or p.choices)


def verb_named(name: str, surface: Surface) -> Verb:
    """The verb of that name. Raises UsageError, naming the nearest."""
    known = {verb.name: verb for verb in VERBS if surface in verb.surfaces}
    if name not in known:
        if any(verb.name == name for verb in VERBS):
            raise UsageError(f"{name!r} is not for the {surface}: use dshistory.{name}(...) in Python or a notebook")
        raise UsageError(f"there is no {name!r}; {nearest(name, known)}")
    return known[name]


def _docstring(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or ""


def _argument_helps(function: Callable[..., Any]) -> dict[str, str]:
    """Name -> text of the `Args:` section, continuation lines joined."""
    section = _docstring(function).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{name} must be a number, not {text!r}") from error


_WHOLE_NUMBER: Final = re.compile(r"[+-]?\d+")

VERBS: Final[tuple[Verb, ...]] = (
    Verb("open", current.open, ("open ./history",), surfaces=("magic",), needs_history=False),
    Verb("log", Explorer.log, ("log", "log --run 20261121-101502-7f3a9c")),
    Verb("show", Explorer.show, ("show", "show 1200", "show best")),
    Verb("diff", Explorer.diff, ("diff 1200 1250", "diff 1200 latest --names '*.mlp.*' --kinds '*'")),
    Verb(
        "trajectory",
        Explorer.trajectory,
        ("trajectory '*.mlp.*'", "trajectory lm_head.weight --metric norm --kinds '*'"),
    ),
    Verb("layers", Explorer.layers, ("layers", "layers '*.mlp.*' --metric norm --first 1000")),
    Verb("histogram", Explorer.histogram, ("histogram lm_head.weight", "histogram lm_head.weight --state exp_avg_sq")),
    Verb("explore", Explorer.explore, ("explore", "explore '*.mlp.*'"), surfaces=("magic",)),
    Verb("watch", Explorer.watch, ("watch", "watch --seconds 5"), surfaces=("magic",)),
    Verb("tensor", Explorer.tensor, ("tensor lm_head.weight 1200", "tensor lm_head.weight 1200 --state exp_avg")),
    Verb("tags", Explorer.tags, ("tags",)),
    Verb("restore", Explorer.restore, ("restore 1200 --kinds model",), surfaces=("magic",)),
    Verb(
        "export",
        Explorer.export,
        ("export 1200 step-1200.safetensors", "export latest my-model --format huggingface --config config.json"),
    ),
    Verb(
        "sql",
        Explorer.sql,
        (
            'sql "SELECT step, bytes FROM checkpoints"',
            "sql 'SELECT * FROM metrics WHERE step = $step' --params step=50",
        ),
    ),
    Verb("distances", Explorer.distances, ("distances", "distances '*.mlp.*'")),
    Verb("anomalies", Explorer.anomalies, ("anomalies",)),
    Verb("bisect", Explorer.bisect, ("bisect 'loss > 4.5'", "bisect 'grad_norm > 10' 1200 latest")),
    Verb("analyze", Explorer.analyze, ("analyze", "analyze 1200")),
    Verb("verify", Explorer.verify, ("verify", "verify 1200")),
    Verb("reindex", Explorer.reindex, ("reindex",)),
    Verb(
        "import",
        import_checkpoint,
        ("import outputs/ --history my-history", "import model.safetensors --step 1200"),
        needs_history=False,
    ),
    Verb("doctor", doctor.doctor, ("doctor .",), needs_history=False),
)
