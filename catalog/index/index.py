"""The catalog's index: what is registered is found fast, what is not is found all the same.

The index is derived from run facts, markers, manifests and journals; nothing depends on it. A query sees the index and the tail,
which is what the folders have beyond it; when nobody may look into the index, because a foreign client holds the file, the
tail is everything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import pyarrow as pa

from catalog.errors import FormatError, SetupError
from catalog.format.json_facts import read_history_json
from catalog.index.database import Connection, database, select, tables_read
from catalog.index.fair_lock import IndexBusyError
from catalog.index.ingest import RowCache
from catalog.index.schema import MIGRATIONS, TABLES, VERSION, VIEWS, changed_statement, view_statements
from catalog.index.unindexed import Ingested, Tail, scan
from catalog.paths import HistoryPaths

__all__ = ["Asking", "asking", "query", "register", "reindex"]

READER_PATIENCE_S = 2.0
"""More than any writer keeps a reader waiting, if it lives."""

REINDEX_PATIENCE_S = 60.0
_MAX_UNPARSED = 16
"""So many files are parsed while the index is attached; more are parsed while it is free for others."""

_MAX_BATCH = 128
_MAX_BATCH_BYTES = 256 << 20
"""Of files and rows that one transaction ingests; half of what the cache of rows keeps."""

_SHOW_TABLES = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)

_cache = RowCache()


class Asking(Protocol):
    """One SELECT over the catalog's views. SetupError when it is not that, or fails."""

    def __call__(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table: ...


@contextmanager
def asking(paths: HistoryPaths) -> Iterator[Asking]:
    """For several SELECTs about the same moment. Writers wait meanwhile, so nothing long may go on in between."""
    with _session(paths) as (connection, indexed, tail):
        new = tail.new() if indexed else frozenset(TABLES)
        for name, table in tail.tables(new).items():
            connection.register(name, table)
        hiding = bool(tail.hidden or tail.gone or tail.hidden_runs)

        def ask(sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
            names = tables_read(connection, sql)
            for statement in view_statements(names, indexed=indexed, hiding=hiding, new=new, before=tail.before()):
                connection.execute(statement)
            return select(connection, sql, params)

        yield ask


def query(paths: HistoryPaths, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
    """The result of one SELECT over the catalog's views, or their names for SHOW TABLES. SetupError when `sql` is not that,
    or fails."""
    if _SHOW_TABLES.fullmatch(sql):
        # DuckDB's own answer would list what the views are made from too.
        return pa.table({"name": sorted(VIEWS)})
    with asking(paths) as ask:
        return ask(sql, params)


def register(paths: HistoryPaths, *, patience_s: float) -> int:
    """Ingest every committed checkpoint and journal segment that the index does not have, much of it in several transactions; the number
    of checkpoints ingested. When the index is busy for longer than the patience, whoever comes next does the rest."""
    checkpoints = 0
    try:
        for count in _batches(paths, patience_s=patience_s):
            checkpoints += count
    except IndexBusyError:
        pass
    return checkpoints


def reindex(paths: HistoryPaths) -> int:
    """Delete the index and build it anew; the number of checkpoints in it. SetupError when others hold it all the time."""
    try:
        with database(paths).removing(patience_s=REINDEX_PATIENCE_S):
            pass
        return sum(_batches(paths, patience_s=REINDEX_PATIENCE_S))
    except IndexBusyError as error:
        raise SetupError(
            f"{paths.catalog_db}: could not be rebuilt, {error}; close what holds the file and try again"
        ) from error


def _batches(paths: HistoryPaths, *, patience_s: float) -> Iterator[int]:
    """Ingest what is missing, a transaction at a time: the checkpoints of each. Files are parsed before it, but for a few, so
    that readers wait for no more than the insertion of a batch, and memory is that of a batch."""
    db = database(paths)
    while True:
        with db.writing(patience_s=patience_s) as connection:
            _migrate(connection, paths)
            tail = scan(
                paths, _ingested(connection), cache=_cache, max_unparsed=_MAX_UNPARSED, max_bytes=_MAX_BATCH_BYTES
            )
            _insert(connection, tail)
            ingested = _ingested(connection)
        yield tail.checkpoints
        if tail.complete:
            return
        scan(paths, ingested, cache=_cache, max_unparsed=_MAX_BATCH, max_bytes=_MAX_BATCH_BYTES)


@contextmanager
def _session(paths: HistoryPaths) -> Iterator[tuple[Connection, bool, Tail]]:
    """A connection, whether the index is attached to it, and the tail beyond it."""
    db = database(paths)
    limit: int | None = _MAX_UNPARSED
    while True:
        try:
            with db.reading(patience_s=READER_PATIENCE_S) as connection:
                indexed = _is_current(connection, paths)
                ingested = _ingested(connection) if indexed else Ingested()
                tail = scan(paths, ingested, cache=_cache, max_unparsed=limit)
                if tail.complete:
                    yield connection, indexed, tail
                    return
        except IndexBusyError:
            break
        scan(paths, ingested, cache=_cache)
        limit = None
    tail = scan(paths, Ingested(), cache=_cache)
    with db.detached() as connection:
        yield connection, False, tail


def _ingested(connection: Connection) -> Ingested:
    def by_run(table: str, column: str) -> dict[str, frozenset[Any]]:
        rows = connection.execute(f"SELECT run, list({column}) FROM idx.{table} GROUP BY run").fetchall()
        return {run: frozenset(values) for run, values in rows}

    return Ingested(
        steps=by_run("checkpoints", "step"),
        analyses=by_run("analyses", "step"),
        segments=by_run("segments", "segment"),
        runs=frozenset(run for (run,) in connection.execute("SELECT run FROM idx.runs").fetchall()),
    )


def _version(connection: Connection, paths: HistoryPaths) -> int:
    """The schema's version of the index attached, 0 for an empty one. FormatError for a newer one, or another history's."""
    tables = connection.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = 'idx'").fetchall()
    if not tables:
        return 0
    if ("meta",) not in tables:
        raise FormatError(f"{paths.catalog_db}: has tables but no table meta: not an index of this project; delete it")
    rows = connection.execute("SELECT version, uuid FROM idx.meta").fetchall()
    if len(rows) != 1:
        raise FormatError(f"{paths.catalog_db}: table meta has {len(rows)} rows, must have one: delete the file")
    version, uuid = rows[0]
    if version > VERSION:
        raise FormatError(
            f"{paths.catalog_db}: table meta: version {version}, this release knows {VERSION}: use a newer release, or "
            f"rebuild the index with `dshistory reindex {paths.root}`"
        )
    if uuid != read_history_json(paths)["uuid"]:
        raise FormatError(
            f"{paths.catalog_db}: table meta: uuid {uuid} is that of another history; rebuild the index with `dshistory reindex {paths.root}`"
        )
    return int(version)


def _is_current(connection: Connection, paths: HistoryPaths) -> bool:
    """An index of an older version is as good as none to a reader: the next writer brings it up to date."""
    return _version(connection, paths) == VERSION


def _migrate(connection: Connection, paths: HistoryPaths) -> None:
    version = _version(connection, paths)
    if version == VERSION:
        return
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute("DELETE FROM idx.meta")
    connection.execute("INSERT INTO idx.meta VALUES (?, ?)", [VERSION, read_history_json(paths)["uuid"]])


def _insert(connection: Connection, tail: Tail) -> None:
    for name, table in tail.tables(TABLES).items():
        connection.register(name, table)
    if tail.hidden_runs:
        for table in TABLES:
            connection.execute(f"DELETE FROM idx.{table} WHERE run IN (SELECT run FROM tail_hidden_runs)")
    if tail.hidden:
        for table in ("checkpoints", "tensors", "fragments"):
            connection.execute(f"DELETE FROM idx.{table} WHERE (run, step) IN (SELECT (run, step) FROM tail_hidden)")
    if tail.gone:
        for table in ("statistics", "sketches", "analyses"):
            connection.execute(f"DELETE FROM idx.{table} WHERE (run, step) IN (SELECT (run, step) FROM tail_gone)")
    connection.execute(changed_statement(indexed=True, hiding=False, before=tail.before()))
    for name in TABLES:
        connection.execute(
            f"INSERT INTO idx.{name} SELECT * FROM {'tail_changed' if name == 'tensors' else f'tail_{name}'}"
        )
