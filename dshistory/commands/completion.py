"""Completion of `%dshistory` lines from the current history: verbs, options, steps, tags, runs, kinds, tensor names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from catalog.errors import HistoryError
from catalog.records import Extent
from catalog.references import lineage
from dshistory import current
from dshistory.commands.parameters import Parameter, parameters
from dshistory.commands.sql_cell import OPTIONS as CELL_OPTIONS
from dshistory.commands.sql_cell import unquoted
from dshistory.commands.sql_completion import Completions, query_completions
from dshistory.commands.verbs import all_verbs
from dshistory.explorer import Explorer
from dshistory.options import DIFF_METRICS, Ref
from dshistory.registry import Verb

__all__ = ["line_completions", "value_completions"]


def line_completions(line: str, *, saved: Sequence[str] = (), variables: Sequence[str] = ()) -> Completions:
    """Return the words that can stand at the end of `line`, which begins after the magic's name, and the text that they
    replace; no words when nothing fits."""
    words = line.split()
    start = words.pop() if line[-1:].strip() else ""
    verbs = {verb.name: verb for verb in all_verbs() if "magic" in verb.surfaces}
    if not words:
        return _beginning(start, [*verbs, "--help"] if start.startswith("-") else verbs)
    verb = verbs.get(words[0])
    if verb is None:
        return Completions("", [])
    if verb.name == "sql":
        query = unquoted(line)
        if query is not None:
            return query_completions(query[1], query[1], saved=saved, variables=variables)
        if words[-1] in ("-w", "--with"):
            return _beginning(start, saved)
    if words[-1] in ("-C", "--history"):
        return Completions(start, _paths(start))
    option, equals, value = start.partition("=")
    if start.startswith("-") and equals:
        return value_completions(_next_parameter(verb, [option]), value, current.current)
    if start.startswith("-") and not start[1:].isdigit():
        return _beginning(start, _options(verb))
    return value_completions(_next_parameter(verb, words[1:]), start, current.current)


def _beginning(start: str, texts: Iterable[str]) -> Completions:
    """Complete `start` from `texts`; a quote at the beginning is kept, and closed."""
    quote = start[0] if start[:1] in ("'", '"') else ""
    wanted = start.removeprefix(quote)
    return Completions(start, [f"{quote}{text}{quote}" for text in texts if text.startswith(wanted)])


def _options(verb: Verb) -> list[str]:
    options = [parameter.option for parameter in parameters(verb) if not parameter.positional]
    return [
        *options,
        *(CELL_OPTIONS if verb.name == "sql" else ()),
        *(["--history"] if verb.needs_history else []),
        "--help",
    ]


def _next_parameter(verb: Verb, words: list[str]) -> Parameter | None:
    """Return the option that needs its value next, else the first argument that is not given yet."""
    options = {p.option: p for p in parameters(verb) if not (p.positional or p.flag)}
    if words and words[-1] in options:
        return options[words[-1]]
    before = ["", *words]
    given = [word for last, word in zip(before, words, strict=False) if not (word.startswith("--") or last in options)]
    places = [parameter for parameter in parameters(verb) if parameter.positional]
    return places[len(given)] if len(given) < len(places) else None


def value_completions(parameter: Parameter | None, start: str, explorer: Callable[[], Explorer]) -> Completions:
    """Return the values of the parameter that begin with `start`, from the history of `explorer`, which may raise."""
    if parameter is None:
        return Completions(start, [])
    if parameter.choices:
        return _beginning(start, parameter.choices)
    if parameter.annotation in (Path | str, Path | str | None):
        return Completions(start, _paths(start))
    source = _refs if parameter.annotation in (Ref, Ref | None) else _SOURCES.get(parameter.name)
    if source is None:
        return Completions(start, [])
    try:
        return _beginning(start, source(explorer(), start))
    except (HistoryError, OSError):
        # Completion runs at every keypress; the verb itself reports what is wrong with the history.
        return Completions(start, [])


def _paths(start: str) -> list[str]:
    """Return files and folders, hidden ones only after a dot; names that need quotes are left out."""
    folder, slash, name = start.rpartition("/")
    place = Path(folder + slash).expanduser()
    try:
        found = sorted(place.iterdir())
    except OSError:
        return []
    wanted = [path for path in found if (path.name.startswith(name) and name[:1] == ".") or path.name[0] != "."]
    names = [f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in wanted]
    return [text for text in names if text.startswith(start) and not set(text) & set(" '\"$")]


def _refs(explorer: Explorer, start: str) -> list[str]:
    """Return the references to checkpoints, the newest first, because a long list is cut at its end."""
    history = explorer.history
    run, colon, _ = start.rpartition(":")
    if colon:
        return [f"{run}:{which}" for which in ("latest", "best", *reversed(history.steps(run)))]
    current_run = history.current_run()
    steps = [str(ref.step) for ref in reversed(lineage(history.paths, current_run))]
    others = [f"{run}:" for run in _runs(explorer, start) if run != current_run]
    return ["latest", "best", *explorer.tags()["tag"].to_pylist(), *others, *steps]


def _runs(explorer: Explorer, _: str) -> list[str]:
    return [facts.run for facts in explorer.history.runs()]


def _names(explorer: Explorer, _: str) -> list[str]:
    return sorted({extent.name for extent in _latest_tensors(explorer)})


def _kinds(explorer: Explorer, _: str) -> list[str]:
    return sorted({extent.kind for extent in _latest_tensors(explorer)})


def _latest_tensors(explorer: Explorer) -> list[Extent]:
    return explorer.history.state_extents(explorer.history.resolve("latest"))


_SOURCES: Final[Mapping[str, Callable[[Explorer, str], list[str]]]] = {
    "run": _runs,
    "name": _names,
    "names": _names,
    "tensor": _names,
    "state": _kinds,
    "kinds": _kinds,
    "weights": lambda explorer, start: sorted({"model", "master", *_kinds(explorer, start)}),
    "metrics": lambda explorer, start: list(DIFF_METRICS),
}
