"""The one place that opens DuckDB: an in-memory database for each history and process, to which the index file is
attached for one transaction at a time.

DuckDB lets one process write a file and then nobody else may open it, not even to read; so nobody may hold the index.
The database is closed off before it sees any SQL: of all files it may touch only the index and its log, its
configuration is locked, and nothing is downloaded.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import duckdb
import pyarrow as pa

from catalog.errors import FormatError, SetupError
from catalog.index.fair_lock import IndexBusyError, Turnstile
from catalog.index.sql_errors import explained
from catalog.index.sql_guard import refuse_reach
from catalog.paths import HistoryPaths

__all__ = ["Connection", "Database", "IndexMissingError", "database", "select", "tables_read"]

Connection: TypeAlias = duckdb.DuckDBPyConnection


_LOG_SUFFIXES = ("", ".wal", ".wal.checkpoint", ".wal.recovery")
_WRITING = "READ_WRITE, ROW_GROUP_SIZE 16384"
"""DuckDB writes the last row group of a table anew whenever rows are added: small ones, so that this is little."""

_LOCKED_DOWN = (
    "SET temp_directory = ''",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET TimeZone = 'UTC'",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


class IndexMissingError(IndexBusyError):
    """There is no index file yet; never leaves this package."""


class Database:
    """The in-memory database of one history in this process. Its sessions exclude each other, in this process and, by
    the turnstile, in all others."""

    def __init__(self, paths: HistoryPaths) -> None:
        self.path = paths.catalog_db
        self._turnstile = Turnstile(gate=paths.gate_lock, room=paths.room_lock)
        self._mutex = threading.Lock()
        self._connection: Connection | None = None

    @contextmanager
    def reading(self, *, patience_s: float) -> Iterator[Connection]:
        """A connection inside one transaction, rolled back at the end, with the index attached for reading. IndexBusyError
        when a writer, or a foreign client, has it for longer than the patience; IndexMissingError when there is none."""
        with (
            self._turn(patience_s) as left_s,
            self._turnstile.reading(patience_s=left_s),
            self._attached("READ_ONLY") as connection,
        ):
            yield connection

    @contextmanager
    def writing(self, *, patience_s: float) -> Iterator[Connection]:
        """A connection inside one transaction with the index attached for writing, made when there is none; committed
        at the end of the body. IndexBusyError when others have it for longer than the patience."""
        with (
            self._turn(patience_s) as left_s,
            self._turnstile.writing(patience_s=left_s),
            self._attached(_WRITING) as connection,
        ):
            yield connection
            connection.commit()

    @contextmanager
    def detached(self) -> Iterator[Connection]:
        """A connection inside one transaction, rolled back at the end, without the index."""
        with self._mutex, self._transaction() as connection:
            yield connection

    def rest(self) -> None:
        """Let DuckDB's threads and memory go, unless a session is under way; the next one opens it anew."""
        if self._mutex.acquire(blocking=False):
            try:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            finally:
                self._mutex.release()

    @contextmanager
    def removing(self, *, patience_s: float) -> Iterator[None]:
        """The body runs while nobody of ours reads or writes the index, which has been deleted."""
        with self._turn(patience_s) as left_s, self._turnstile.writing(patience_s=left_s):
            for suffix in _LOG_SUFFIXES:
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            yield

    @contextmanager
    def _turn(self, patience_s: float) -> Iterator[float]:
        """This process' own queue, within the same patience; gives what is left of it."""
        begun = time.monotonic()
        if not self._mutex.acquire(timeout=patience_s):
            raise IndexBusyError("another thread of this process uses the index")
        try:
            yield max(0.0, patience_s - (time.monotonic() - begun))
        finally:
            self._mutex.release()

    @contextmanager
    def _attached(self, mode: str) -> Iterator[Connection]:
        if mode == "READ_ONLY" and not self.path.exists():
            raise IndexMissingError(f"{self.path}: no index yet")
        base = self._base()
        try:
            base.execute(f"ATTACH ? AS idx ({mode})", [str(self.path)])
            try:
                with self._transaction() as connection:
                    yield connection
            finally:
                base.execute("DETACH idx")
        except duckdb.Error as error:
            raise self._explained(error) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """A cursor of its own, so that temporary tables and views vanish with it."""
        cursor = self._base().cursor()
        try:
            cursor.begin()
            yield cursor
        finally:
            cursor.close()

    def _base(self) -> Connection:
        if self._connection is None:
            connection = duckdb.connect(":memory:")
            allowed = [str(self.path.with_name(self.path.name + suffix)) for suffix in _LOG_SUFFIXES]
            connection.execute("SET allowed_paths = ?", [allowed])
            for statement in _LOCKED_DOWN:
                connection.execute(statement)
            self._connection = connection
        return self._connection

    def _explained(self, error: duckdb.Error) -> Exception:
        """A lock held by a stranger is ordinary; anything else is a broken index, which can be rebuilt."""
        if isinstance(error, duckdb.IOException) and "Could not set lock" in str(error):
            return IndexBusyError(f"{self.path}: a foreign client holds the file")
        if isinstance(error, duckdb.IOException) and not self.path.exists():
            return IndexMissingError(f"{self.path}: no index yet")
        return FormatError(
            f"{self.path}: DuckDB can't use the index: {str(error).splitlines()[0]}: it is derived, so delete it or run "
            f"`dshistory reindex {self.path.parent}`"
        )


def tables_read(connection: Connection, sql: str) -> frozenset[str] | None:
    """See `refuse_reach`: SetupError unless `sql` is one SELECT that reads the catalog alone."""
    try:
        serialized = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0]
    except duckdb.Error as error:
        raise SetupError(f"the query failed: {error}") from error
    return refuse_reach(serialized, sql=sql)


def select(connection: Connection, sql: str, params: Sequence[object] | Mapping[str, object]) -> pa.Table:
    """The result of one SELECT of a user's, which `tables_read` did not refuse. SetupError says how it failed.

    A damaged index shows only here, when DuckDB reads the pages in question: its error passes through.
    """
    bound = dict(params) if isinstance(params, Mapping) else list(params)
    names = list(params) if isinstance(params, Mapping) else [repr(value) for value in params]
    try:
        return connection.sql(sql, params=bound).to_arrow_table()
    except duckdb.Error as error:
        if type(error) is duckdb.Error or isinstance(error, (duckdb.IOException, duckdb.FatalException)):
            raise
        raise SetupError(f"the query failed: {explained(str(error), names)}") from error


_MOST_AWAKE = 4
"""Each has some ten threads of its own."""

_databases: dict[Path, Database] = {}
_databases_lock = threading.Lock()


def database(paths: HistoryPaths) -> Database:
    """This process' database for the history at `paths`, however its root is written. Those of histories that were not
    asked for lately rest.
    """
    root = paths.root.resolve()
    with _databases_lock:
        asked = _databases.pop(root, None) or Database(HistoryPaths(root))
        _databases[root] = asked
        for other in list(_databases.values())[:-_MOST_AWAKE]:
            other.rest()
        return asked


def _forget_after_fork() -> None:
    """DuckDB's threads and locks do not survive a fork: the child begins anew, and never frees what it inherited, not at
    its end either: that would wait for threads that it does not have, and abort."""
    global _databases, _databases_lock
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_databases))
    _databases = {}
    _databases_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
