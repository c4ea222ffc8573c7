"""The guard of users' SQL: it may name the tables and views of the catalog, and table functions that only compute.

The database itself already refuses all files but the index, and all changes to its configuration. The guard refuses the
rest: opening the index a second time, which would drop DuckDB's own lock on it, and functions that take addresses in
memory.
"""

import json
from collections.abc import Iterator
from typing import Any

from catalog.errors import SetupError

__all__ = ["check_select"]

_TABLE_FUNCTIONS = frozenset(
    {
        "duckdb_columns",
        "duckdb_functions",
        "duckdb_keywords",
        "duckdb_settings",
        "duckdb_tables",
        "duckdb_types",
        "duckdb_views",
        "generate_series",
        "json_each",
        "json_tree",
        "pragma_table_info",
        "range",
        "repeat",
        "repeat_row",
        "unnest",
    }
)
_FILE_MARKS = frozenset("./\\:")
"""A table name with one of these characters could be the name of a file."""


def check_select(serialized: str, *, sql: str) -> frozenset[str] | None:
    """Return the names of the tables that a query reads, or None when it also asks which tables exist.

    SetupError when `sql` is not exactly one SELECT, or does anything but read tables of the catalog and compute.
    `serialized` is the result of DuckDB's `json_serialize_sql` for `sql`; that function accepts nothing but SELECT.
    """
    tree = json.loads(serialized)
    if tree.get("error"):
        message = tree.get("error_message")
        if "Only SELECT" in message:
            raise SetupError(f"a query is one SELECT, the catalog can only be read: {sql[:200]!r}")
        raise SetupError(
            f"the query can't be read as SQL: {message}: {sql[:200]!r}; it is one SELECT, the catalog can only be read"
        )
    if len(tree["statements"]) != 1:
        raise SetupError(f"a query is one SELECT, this has {len(tree['statements'])} statements: {sql[:200]!r}")
    tables: set[str] = set()
    lists_tables = False
    for node in _nodes(tree):
        if node.get("type") == "BASE_TABLE":
            tables.add(node["table_name"].lower())
        lists_tables |= node.get("type") in ("SHOW_REF", "TABLE_FUNCTION")
        if node.get("type") == "TABLE_FUNCTION":
            name = (node.get("function") or {}).get("function_name")
            if name not in _TABLE_FUNCTIONS:
                raise SetupError(f"a query can't use {name}(): only tables of the catalog and functions that compute")
        names = (node.get(key) for key in ("table_name", "schema_name", "catalog_name"))
        if any(isinstance(name, str) and _FILE_MARKS & set(name) for name in names):
            raise SetupError(f"a query can't read files, only tables of the catalog: {sql[:200]!r}")
    return None if lists_tables else frozenset(tables)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
