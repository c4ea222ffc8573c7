"""Completion of queries: tables, columns, saved queries and variables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from catalog.errors import HistoryError
from catalog.index.schema import VIEWS
from dshistory import current

__all__ = ["Completions", "query_completions"]


class Completions(NamedTuple):
    """The end of the typed text, and the words that can replace it."""

    fragment: str
    texts: list[str]


_COLUMNS: Final = """
SELECT table_name, column_name FROM duckdb_columns()
WHERE list_contains($tables, table_name) ORDER BY table_name, column_index
"""


def query_completions(
    before: str, query: str, *, saved: Sequence[str] = (), variables: Sequence[str] = ()
) -> Completions:
    """Return the words that can stand at the end of `before`, the part of `query` up to the cursor; none inside a text
    in quotes."""
    variable = re.search(r"(?:\$|\{\{\s*)(\w*)$", before)
    if variable:
        return _beginning(variable[1], variables)
    if before.count("'") % 2:
        return Completions("", [])
    of_table = re.search(r"(\w+)\.(\w*)$", before)
    columns = _columns()
    if of_table:
        every = dict.fromkeys(column for table in VIEWS for column in columns.get(table, ()))
        return _beginning(of_table[2], columns.get(_table_of(of_table[1], query), every))
    word = re.search(r"\w*$", before)
    start = word[0] if word else ""
    tables = [*VIEWS, *saved]
    if re.search(r"\b(?:from|join)\s+\w*$", before, re.IGNORECASE):
        return _beginning(start, tables)
    read = [name for name in VIEWS if re.search(rf"\b{name}\b", query, re.IGNORECASE)] or [*VIEWS]
    of_read = dict.fromkeys(column for table in read for column in columns.get(table, ()))
    return _beginning(start, [*of_read, *(table for table in tables if table not in of_read)])


def _beginning(start: str, texts: Iterable[str]) -> Completions:
    return Completions(start, [text for text in texts if text.lower().startswith(start.lower())])


def _table_of(alias: str, query: str) -> str:
    """Return the table that an alias stands for."""
    found = re.search(rf"\b({'|'.join(VIEWS)})\s+(?:AS\s+)?{re.escape(alias)}\b", query, re.IGNORECASE)
    return found[1].lower() if found else alias.lower()


def _columns() -> Mapping[str, list[str]]:
    try:
        rows = current.current().sql(_COLUMNS, tables=[*VIEWS])
    except (HistoryError, OSError):
        # Completion runs at every keypress; the query itself reports what is wrong with the history.
        return {}
    columns: dict[str, list[str]] = {}
    for row in rows:
        columns.setdefault(row["table_name"], []).append(row["column_name"])
    return columns
