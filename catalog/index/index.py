"""Queries over a history and registration in its index.

The index is derived from run facts, markers, manifests, statistics, audits and journals; nothing depends on it. A query
sees the index and the unindexed rest, whatever the folders have beyond it. When a foreign client holds the index file,
or a crash has torn it, the query takes everything from the folders; a torn index is built anew by the next
registration.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import pyarrow as pa

from catalog.errors import SetupError
from catalog.index.database import Connection, IndexDamagedError, database, select, tables_read
from catalog.index.fair_lock import IndexBusyError
from catalog.index.index_file import ingested_in, insert, is_current, migrate
from catalog.index.ingest import RowCache
from catalog.index.schema import TABLES, VIEWS, view_statements
from catalog.index.unindexed import Ingested, Unindexed, find_unindexed
from catalog.paths import HistoryPaths

__all__ = ["Asking", "asking", "query", "register", "reindex"]

READER_PATIENCE_S = 2.0
"""Longer than any live writer keeps a reader waiting."""

REGISTER_PATIENCE_S = 0.1
"""Short, since nothing is lost when a registration is left to the next one."""

REINDEX_PATIENCE_S = 60.0
_MAX_UNPARSED = 16
"""At most so many files are parsed while the index is attached; others would wait for longer. More files are parsed
while the index is free."""

_NEXT_PATIENCE_S = 0.5
"""A registration that has parsed a batch waits so long for its turn again, because the work would be lost."""

_MAX_BATCH = 64
_MAX_BATCH_BYTES = 32 << 20
"""Limits of one transaction, in files and in bytes of rows. They bound the memory that a registration takes, in a
training."""

_SHOW_TABLES = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)

_cache = RowCache()


class Asking(Protocol):
    """A callable that answers one SELECT over the catalog's views. SetupError when it is not one SELECT, or fails."""

    def __call__(self, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table: ...


@contextmanager
def asking(paths: HistoryPaths) -> Iterator[Asking]:
    """Yield a callable for several SELECTs about the same moment. Writers wait until the body ends, so it must be
    short. IndexDamagedError when a SELECT is the first to see damage in the index; asked again, it does without."""
    with _session(paths) as (connection, indexed, unindexed):
        new = unindexed.new() if indexed else frozenset(TABLES)
        for name, table in unindexed.tables(new).items():
            connection.register(name, table)
        hiding = bool(unindexed.stale_steps or unindexed.stale_statistics or unindexed.stale_runs)
        before = unindexed.before()

        def ask(sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
            names = tables_read(connection, sql)
            for statement in view_statements(names, indexed=indexed, hiding=hiding, new=new, before=before):
                connection.execute(statement)
            return select(connection, sql, params)

        yield ask


def query(paths: HistoryPaths, sql: str, params: Sequence[object] | Mapping[str, object] = ()) -> pa.Table:
    """Return the result of one SELECT over the catalog's views, or their names for SHOW TABLES. SetupError when `sql`
    is neither, or fails."""
    if _SHOW_TABLES.fullmatch(sql):
        # DuckDB's own answer would also list the tables behind the views.
        return pa.table({"name": sorted(VIEWS)})
    try:
        with asking(paths) as ask:
            return ask(sql, params)
    except IndexDamagedError:
        with asking(paths) as ask:
            return ask(sql, params)


def register(paths: HistoryPaths, *, patience_s: float = REGISTER_PATIENCE_S) -> int:
    """Ingest every committed checkpoint, statistics file, audit and journal segment that the index does not have;
    return the number of checkpoints ingested.

    This is the only way into the index, for a training, an import and the analysis alike. Many files take several
    transactions. When the index stays busy for longer than the patience, the rest is left to the next call. A damaged
    index is deleted and built anew. FormatError when the index is not of this history or release, or can't be written.
    """
    checkpoints = 0
    with contextlib.suppress(IndexBusyError):
        try:
            for count in _batches(paths, patience_s=patience_s):
                checkpoints += count
        except IndexDamagedError:
            database(paths).remove(patience_s=patience_s)
            checkpoints = sum(_batches(paths, patience_s=patience_s))
    # The pool keeps what a thread has freed for that thread, which comes back for it after the next checkpoint only.
    pa.default_memory_pool().release_unused()
    return checkpoints


def reindex(paths: HistoryPaths) -> int:
    """Delete the index and build it again; return the number of checkpoints in it. SetupError when others hold it for
    longer than REINDEX_PATIENCE_S."""
    try:
        database(paths).remove(patience_s=REINDEX_PATIENCE_S)
        return sum(_batches(paths, patience_s=REINDEX_PATIENCE_S))
    except IndexBusyError as error:
        raise SetupError(
            f"{paths.catalog_db}: could not be rebuilt, {error}; close what holds the file and try again"
        ) from error


def _batches(paths: HistoryPaths, *, patience_s: float) -> Iterator[int]:
    """Ingest the unindexed files, one transaction at a time; yield the number of checkpoints of each.

    All but a few files are parsed between the transactions, while the index is free, so that readers wait only for the
    insertion of one batch, and memory is that of one batch.
    """
    db = database(paths)
    if db.is_damaged:
        # Found by a query: what a registration itself reads may well be whole.
        db.remove(patience_s=patience_s)
    # Not the cache of the queries: what is in the index is not asked of the files again. Twice the bytes of a batch, so
    # that the rows parsed before a transaction are still there inside it.
    cache = RowCache(limit_bytes=2 * _MAX_BATCH_BYTES)
    while True:
        with db.writing(patience_s=patience_s) as connection:
            migrate(connection, paths)
            unindexed = find_unindexed(
                paths, ingested_in(connection), cache=cache, max_unparsed=_MAX_UNPARSED, max_bytes=_MAX_BATCH_BYTES
            )
            insert(connection, unindexed)
            # Nothing is left to be looked for behind the last batch.
            ingested = Ingested() if unindexed.complete else ingested_in(connection)
        yield unindexed.checkpoints
        if unindexed.complete:
            return
        # Only to fill the cache with the next batch.
        find_unindexed(paths, ingested, cache=cache, max_unparsed=_MAX_BATCH, max_bytes=_MAX_BATCH_BYTES)
        patience_s = max(patience_s, _NEXT_PATIENCE_S)


@contextmanager
def _session(paths: HistoryPaths) -> Iterator[tuple[Connection, bool, Unindexed]]:
    """Yield a connection, whether a usable index is attached to it, and the unindexed rest."""
    db = database(paths)
    limit: int | None = _MAX_UNPARSED
    reading = False
    while not db.is_damaged:
        try:
            with db.reading(patience_s=READER_PATIENCE_S) as connection:
                indexed = is_current(connection, paths)
                ingested = ingested_in(connection) if indexed else Ingested()
                unindexed = find_unindexed(paths, ingested, cache=_cache, max_unparsed=limit)
                if unindexed.complete:
                    reading = True
                    yield connection, indexed, unindexed
                    return
        except IndexBusyError:
            break
        except IndexDamagedError as error:
            if not db.is_damaged or reading:
                raise
            warnings.warn(f"{error}; until then, answers are read from the files of the history", stacklevel=2)
            break
        # Too many files for the time that a reader may hold the index: parse them now, while it is free, and try again.
        # The second time most are in the cache, and a few new ones must not send this reader round for ever.
        find_unindexed(paths, ingested, cache=_cache)
        limit = None
    unindexed = find_unindexed(paths, Ingested(), cache=_cache)
    with db.detached() as connection:
        yield connection, False, unindexed
