"""The text of `%%dshistory sql` cells: the line above the query, values for its variables, and saved queries as CTEs.

Values are bound as parameters, never pasted into the query. The option names are those of JupySQL.
"""

import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from catalog.index.schema import VIEWS
from catalog.nearest_names import nearest
from dshistory.commands.parameters import UsageError

__all__ = ["CELL_HELP", "OPTIONS", "Head", "SavedQueries", "bound", "parse_head", "read", "take_target", "unquoted"]

CELL_HELP: Final = """
as a cell, the query below its first line: %%dshistory sql [options] [NAME <<]
  NAME <<               assign the rows to the variable NAME and show nothing; NAME= << shows them too
  -S NAME, --save NAME  save the query: later queries read it as a table of that name
  -w NAME, --with NAME  read this saved query (the ones that a query names are found anyway)
  -N, --no-execute      save the query without running it
  -f FILE, --file FILE  read the query from a file
  $name, {{name}}       the value of a Python variable"""


@dataclass(frozen=True)
class Head:
    """The options in the line above a query; `words` are left for the verb itself."""

    save: str | None
    with_: tuple[str, ...]
    execute: bool
    file: Path | None
    words: tuple[str, ...]


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%dshistory sql: {message}; see %dshistory sql --help")


_PARSER: Final = _Parser(prog="%%dshistory sql", add_help=False, allow_abbrev=False, usage=SUPPRESS)
_PARSER.add_argument("-S", "--save")
_PARSER.add_argument("-w", "--with", dest="with_", action="append", default=[])
_PARSER.add_argument("-N", "--no-execute", action="store_true")
_PARSER.add_argument("-f", "--file")

OPTIONS: Final = ("--save", "--with", "--no-execute", "--file")

_TARGET: Final = re.compile(r"(?P<name>\S*?)\s*(?P<shows>=?)\s*<<")
_QUERY: Final = re.compile(r"(?<![\w-])(?:select|with|from|describe|show|summarize)\s.*", re.IGNORECASE | re.DOTALL)


def unquoted(rest: str) -> tuple[str, str] | None:
    """Split the line after `sql` before a query without quotes around it; None when there is no such query."""
    found = _QUERY.search(rest)
    if found is None or set(rest[: found.start()]) & {"'", '"'}:
        return None
    return rest[: found.start()], found[0]


def take_target(rest: str) -> tuple[str, str | None, bool]:
    """Return the line without `NAME <<`, the name, and whether the rows are shown too (`NAME= <<`).

    Raises UsageError when NAME is not a valid name."""
    found = _TARGET.search(rest)
    if found is None:
        return rest, None, True
    if not found["name"].isidentifier():
        raise UsageError(f"%%dshistory sql NAME <<: {found['name']!r} is not a name for a variable")
    return rest[: found.start()] + rest[found.end() :], found["name"], bool(found["shows"])


def parse_head(words: list[str]) -> Head:
    """Parse the options of a cell; the words left are for the verb. Raises UsageError."""
    given, others = _PARSER.parse_known_args(words)
    for name in filter(None, (given.save, *given.with_)):
        if not name.isidentifier():
            raise UsageError(f"%%dshistory sql: {name!r} is not a name for a saved query: use letters, digits and _")
    file = None if given.file is None else Path(given.file).expanduser()
    return Head(given.save, tuple(given.with_), not given.no_execute, file, tuple(others))


def read(file: Path) -> str:
    """Read the query from a file. Raises UsageError when that fails."""
    try:
        return file.read_text()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"%dshistory sql --file {file}: {error}") from error


_CODE: Final = re.compile(
    r"""
    (?P<text>'(?:[^']|'')*')
    | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$
    | \{\{\s*(?P<braced>\w+)\s*\}\} | \$(?P<dollar>[A-Za-z_]\w*) | (?P<word>[A-Za-z_]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)
_AFTER_FROM: Final = re.compile(r"\b(?:from|join)\s+$", re.IGNORECASE)
_OWN_WITH: Final = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*WITH\s+(RECURSIVE\s+)?", re.IGNORECASE | re.DOTALL)
_BRACED: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def bound(query: str, namespace: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the query with `$name` for each variable, and the values of the variables that `given` does not have.

    The value of `{{name}}` inside quotes becomes part of the text. Raises UsageError, with the nearest name, when there
    is no such variable."""
    values: dict[str, Any] = {}

    def place(name: str) -> str:
        if name not in given:
            if name not in namespace:
                known = [other for other in namespace if not other.startswith("_")]
                raise UsageError(f"no variable {name!r} for the query; {nearest(name, known, count=1)}")
            values[name] = _plain(namespace[name])
        return f"${name}"

    def replaced(found: re.Match[str]) -> str:
        if name := found["braced"] or found["dollar"]:
            if _AFTER_FROM.search(query[: found.start()]):
                raise UsageError(
                    f"{name!r} stands for a value, not for a table: write the table's name, or --save a query"
                )
            return place(name)
        return _text(found["text"], place, namespace) if found["text"] else found[0]

    return _CODE.sub(replaced, query), values


def _text(literal: str, place: Any, namespace: Mapping[str, Any]) -> str:
    """Return a text in quotes in which SQL itself inserts the values of its `{{names}}`."""
    inner = literal[1:-1]
    if inner.startswith("$") and inner[1:] in namespace:
        raise UsageError(f"{literal} in quotes is literal text: write {inner} without quotes for the variable's value")
    parts = _BRACED.split(inner)
    if len(parts) == 1:
        return literal
    texts = [f"CAST({place(part)} AS VARCHAR)" if i % 2 else f"'{part}'" for i, part in enumerate(parts)]
    return f"({' || '.join(text for text in texts if text != repr(''))})"


def _plain(value: Any) -> Any:
    """Convert columns, arrays and their scalars to Python's own values."""
    for name in ("to_pylist", "tolist"):
        convert = getattr(value, name, None)
        if callable(convert):
            return convert()
    return value


class SavedQueries:
    """Queries saved by name; later queries read each as a table of that name."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SavedQueries({', '.join(self._texts)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they were saved."""
        return tuple(self._texts)

    def save(self, name: str, query: str) -> None:
        """Save a query. Raises UsageError for the name of a table, and for a query that reads itself."""
        if name.lower() in VIEWS:
            raise UsageError(f"{name!r} is a table of the catalog: save the query under another name")
        if name in _words(query):
            raise UsageError(f"the query reads {name!r} and cannot be saved under the same name")
        self._texts[name] = query.strip().rstrip(";")

    def composed(self, query: str, *, with_: tuple[str, ...] = ()) -> str:
        """Return the query preceded by the saved ones that it reads, directly or through others, as CTEs.

        Raises UsageError for a name in `with_` that was not saved, and for queries that read each other in a circle."""
        for name in with_:
            if name not in self._texts:
                raise UsageError(f"no query was saved as {name!r}; {nearest(name, self._texts)}")
        found = [*dict.fromkeys([*with_, *self._read_by(query)])]
        ordered: dict[str, str] = {}
        for name in found:
            self._collect(name, ordered, ())
        if not ordered:
            return query
        tables = ", ".join(f'"{name}" AS (\n{text}\n)' for name, text in ordered.items())
        own = _OWN_WITH.match(query)
        if own is None:
            return f"WITH {tables}\n{query}"
        return f"WITH {own[1] or ''}{tables}, {query[own.end() :]}"

    def _read_by(self, query: str) -> list[str]:
        return [name for name in dict.fromkeys(_words(query)) if name in self._texts]

    def _collect(self, name: str, ordered: dict[str, str], path: tuple[str, ...]) -> None:
        if name in path:
            raise UsageError(f"saved queries read each other in a circle: {' reads '.join([*path, name])}")
        if name in ordered:
            return
        for other in self._read_by(self._texts[name]):
            self._collect(other, ordered, (*path, name))
        ordered[name] = self._texts[name]


def _words(query: str) -> Iterator[str]:
    return (found["word"] for found in _CODE.finditer(query) if found["word"])
