"""DuckDB's message about a failed query, turned into one line that names the nearest table or column."""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from types import MappingProxyType

from catalog.index.schema import TABLES, VIEWS

__all__ = ["explain_sql_error"]


def explain_sql_error(message: str, given: Iterable[str] = ()) -> str:
    """Return one line for the person who wrote the query. `given` are the names of the values passed with it."""
    for pattern, explain in _KNOWN.items():
        found = re.search(pattern, message)
        if found:
            return explain(found)
    counts = re.search(r"argument count mismatch.*Expected (\d+), got (\d+)", message, re.DOTALL)
    if counts:
        return f"it has {counts[1]} places for values, and {counts[2]} were passed: {', '.join(sorted(given))}"
    first = re.split(r"\n\s*(?:LINE \d+:|Candidate functions:)", message)[0]
    return " ".join(first.split())


def _no_table(found: re.Match[str]) -> str:
    return f"there is no table {found[1]!r}; {_nearest(found[1], VIEWS)}the tables are {', '.join(VIEWS)}"


def _no_column(found: re.Match[str]) -> str:
    near = get_close_matches(found[1], _quoted(found[2] or ""), n=3)
    hint = f"the nearest is {' or '.join(near)}" if near else f"text goes in single quotes: '{found[1]}'"
    return f"its tables have no column {found[1]!r}; {hint}"


def _no_column_of(found: re.Match[str]) -> str:
    columns = {name for schema in TABLES.values() for name in schema.names}
    return f"{found[1]} has no column {found[2]!r}; {_nearest(found[2], columns)}DESCRIBE lists a table's columns"


def _no_alias(found: re.Match[str]) -> str:
    tables = ", ".join(_quoted(found[2]))
    return f"{found[1]!r} is none of its tables, which are {tables}"


def _no_function(found: re.Match[str]) -> str:
    near = f"; the nearest is {found[2]}" if found[2] else ""
    return f"there is no function {found[1]}(){near}"


def _no_value(found: re.Match[str]) -> str:
    names = [name.strip() for name in found[1].split(",")]
    return f"no value for {', '.join(f'${name}' for name in names)}: pass it by name, as sql(query, {names[0]}=...)"


def _quoted(text: str) -> list[str]:
    return re.findall(r'"([^"]+)"', text)


def _no_type(found: re.Match[str]) -> str:
    return f"a value of type {found[1]} can't stand in a query: pass numbers, text, dates or lists of them"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=2)
    return f"the nearest is {' or '.join(near)}; " if near else ""


_KNOWN: MappingProxyType[str, Callable[[re.Match[str]], str]] = MappingProxyType(
    {
        r"Table with name (\S+) does not exist": _no_table,
        r'Referenced column "([^"]+)" not found in FROM clause!?(?:\s*Candidate bindings: ([^\n]*))?': _no_column,
        r'list "([^"]+)" does not have a column named "([^"]+)"': _no_column_of,
        r'Referenced table "([^"]+)" not found!?\s*Candidate tables: ([^\n]*)': _no_alias,
        r'Function with name (\S+) does not exist!(?:\s*Did you mean "([^"]+)")?': _no_function,
        r"Unable to transform python value of type '<class '([^']+)'>'": _no_type,
        r"Values were not provided for the following (?:prepared statement )?parameters: (.*)": _no_value,
    }
)
