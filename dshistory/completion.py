"""What may come next in a `%dshistory` line: verbs, options, steps, tags, kinds and tensor names of the current
history."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from catalog.errors import HistoryError
from catalog.manifest import NOT_STATE
from catalog.records import Extent
from catalog.resolve import lineage
from dshistory import current
from dshistory.explorer import Explorer, Ref
from dshistory.verbs import VERBS, Parameter, Verb

__all__ = ["completions"]


def completions(words: list[str], start: str) -> list[str]:
    """The words that may follow `words` (without the magic's own name) and begin with `start`; none when nothing is
    known."""
    verbs = {verb.name: verb for verb in VERBS if "magic" in verb.surfaces}
    if not words:
        return [name for name in verbs if name.startswith(start)]
    verb = verbs.get(words[0])
    if verb is None:
        return []
    if start.startswith("-"):
        return [option for option in _options(verb) if option.startswith(start)]
    parameter = _next_parameter(verb, words[1:])
    return [] if parameter is None else [text for text in _values(parameter) if text.startswith(start)]


def _options(verb: Verb) -> list[str]:
    return [*(parameter.option for parameter in verb.parameters if not parameter.positional), "--help"]


def _next_parameter(verb: Verb, words: list[str]) -> Parameter | None:
    """The option that waits for its value, else the first argument not given yet."""
    options = {p.option: p for p in verb.parameters if not (p.positional or p.flag)}
    if words and words[-1] in options:
        return options[words[-1]]
    before = ["", *words]
    given = [word for last, word in zip(before, words, strict=False) if not (word.startswith("--") or last in options)]
    places = [parameter for parameter in verb.parameters if parameter.positional]
    return places[len(given)] if len(given) < len(places) else None


def _values(parameter: Parameter) -> Iterable[str]:
    source = _refs if parameter.annotation in (Ref, Ref | None) else _SOURCES.get(parameter.name)
    if source is None:
        return ()
    try:
        return source(current.current())
    except (HistoryError, OSError):
        # Completion runs at every keypress; what is wrong with the history is said by the verb itself.
        return ()


def _refs(explorer: Explorer) -> list[str]:
    steps = [str(ref.step) for ref in lineage(explorer.history, explorer.history.current_run())]
    return [*steps, *explorer.tags()["tag"].to_pylist(), "latest", "best"]


def _runs(explorer: Explorer) -> list[str]:
    return [facts.run for facts in explorer.history.runs()]


def _names(explorer: Explorer) -> list[str]:
    return sorted({extent.name for extent in _latest_tensors(explorer)})


def _kinds(explorer: Explorer) -> list[str]:
    return sorted({extent.kind for extent in _latest_tensors(explorer)})


def _latest_tensors(explorer: Explorer) -> list[Extent]:
    extents = explorer.history.extents(explorer.history.resolve("latest"))
    return [extent for extent in extents if extent.kind not in NOT_STATE]


_SOURCES: Final[Mapping[str, Callable[[Explorer], list[str]]]] = {
    "run": _runs,
    "name": _names,
    "names": _names,
    "kind": _kinds,
    "kinds": _kinds,
}
