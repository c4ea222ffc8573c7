"""The one module that opens DuckDB: an in-memory database for each history and process, with the index file attached
for one transaction at a time.

DuckDB lets either one process write a database file or several read it, never both, and a process holds the file for as
long as its connection is open. A connection that stayed open would lock everybody else out: a notebook would stop the
training's registration, and the training every notebook. So nobody holds the index. Each session is

    ATTACH the index file -> one transaction -> DETACH

under the fair lock of `catalog.index.fair_lock`. The in-memory database stays open for many sessions, because starting
DuckDB costs far more than the ATTACH (about 3 ms). Not for ever, because each session leaves something in it.

The database is closed off before it sees any SQL. It may touch no file but the index and DuckDB's own log of it, it
loads no extension, and its configuration is locked.
"""

import ctypes
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import duckdb
import pyarrow as pa

from catalog.disk.regular_file import what_it_is
from catalog.errors import FormatError, SetupError
from catalog.index.fair_lock import FairLock, IndexBusyError
from catalog.index.sql_errors import explain_sql_error
from catalog.index.sql_guard import check_select
from catalog.paths import HistoryPaths

__all__ = ["Connection", "Database", "IndexDamagedError", "IndexMissingError", "database", "select", "tables_read"]

Connection: TypeAlias = duckdb.DuckDBPyConnection

_LOG_SUFFIXES = ("", ".wal", ".wal.checkpoint", ".wal.recovery")
_WRITING = "READ_WRITE, ROW_GROUP_SIZE 16384"
"""DuckDB rewrites the last row group of a table whenever rows are added, so small row groups keep registration
cheap."""

_LOCKED_DOWN = (
    "SET temp_directory = ''",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET TimeZone = 'UTC'",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


_REGISTRATION = (
    "SET threads = 2",
    "SET external_threads = 2",
    "SET async_threads = 0",
    "SET memory_limit = '128MiB'",
    "SET allocator_flush_threshold = '1MiB'",
)
"""A registration runs beside a training: it takes memory for one batch of rows, and only the thread that asks for it.
DuckDB is told of two threads, because with one DuckDB 2.0 returned rows of a join twice. None of them is its own, nor
is any that reads and writes: half a second after a registration, each of its own threads would give the free memory of
the whole process back to the kernel (`malloc_trim`), and the training, whose next step needs it, would take it again
page by page."""

_QUERIES = (f"SET threads = {max(2, len(os.sched_getaffinity(0)))}",)


_DAMAGE = (
    "not a valid DuckDB database",
    "Could not read enough bytes",
    "Corrupt database file",
    "Failure while replaying WAL",
)
"""DuckDB's words for a file whose content is wrong, as opposed to a disk that is full or fails."""


_MAX_SESSIONS = 512
"""An in-memory database has so many sessions before another one takes its place: it grows by some KiB with each. To
close one gives the free memory of the process back to the kernel, and a training takes it again page by page: so it
must be rare."""


class IndexDamagedError(FormatError):
    """The index file was changed or torn. It is derived: questions are answered without it, and the next registration
    builds it anew.
    """


class IndexMissingError(IndexBusyError):
    """There is no index file yet. It never leaves this package."""


class Database:
    """The in-memory database of one history in this process.

    Its sessions run one at a time in this process. Across processes the fair lock admits many readers or one writer.
    """

    def __init__(self, paths: HistoryPaths) -> None:
        self.path = paths.catalog_db
        self._lock = FairLock(queue=paths.index_queue_lock, access=paths.index_access_lock)
        self._mutex = threading.Lock()
        self._connections: dict[bool, Connection] = {}
        """One for queries, and one for registrations, by whether it writes."""
        self._sessions = {False: 0, True: 0}
        """How many sessions each of them has had."""
        self._damaged: tuple[int, int, int] | None = None
        """Tells apart the file that was found to be damaged, which another process may replace."""

    @contextmanager
    def reading(self, *, patience_s: float) -> Iterator[Connection]:
        """Yield a connection inside one transaction, rolled back at the end, with the index attached read-only as
        `idx`.

        IndexBusyError when a writer holds the index for longer than the patience, or a foreign client holds it at all;
        IndexMissingError when there is none; FormatError when DuckDB can't read it.
        """
        with (
            self._own_turn(patience_s) as left_s,
            self._lock.reading(patience_s=left_s),
            self._attached("READ_ONLY") as connection,
        ):
            yield connection

    @contextmanager
    def writing(self, *, patience_s: float) -> Iterator[Connection]:
        """Yield a connection inside one transaction with the index attached as `idx`, created when there is none. The
        transaction is committed when the body ends without an error.

        IndexBusyError when others hold the index for longer than the patience; FormatError when DuckDB can't use it.
        """
        with (
            self._own_turn(patience_s) as left_s,
            self._lock.writing(patience_s=left_s),
            self._attached(_WRITING) as connection,
        ):
            yield connection
            connection.commit()

    @contextmanager
    def detached(self) -> Iterator[Connection]:
        """Yield a connection inside one transaction, rolled back at the end, without the index."""
        with self._mutex, self._transaction(self._base(writes=False)) as connection:
            yield connection

    @property
    def is_damaged(self) -> bool:
        """True when this process has found the index file that is there now to be damaged."""
        return self._damaged is not None and self._damaged == self._identity()

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def close_if_idle(self) -> None:
        """Free DuckDB's threads and memory, unless a session is under way. The next session opens the database
        again."""
        if self._mutex.acquire(blocking=False):
            try:
                while self._connections:
                    self._connections.popitem()[1].close()
            finally:
                self._mutex.release()

    def remove(self, *, patience_s: float) -> None:
        """Delete the index file and DuckDB's log of it, while no process of this project reads or writes them.
        IndexBusyError when others hold the index for longer than the patience."""
        with self._own_turn(patience_s) as left_s, self._lock.writing(patience_s=left_s):
            for suffix in _LOG_SUFFIXES:
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _own_turn(self, patience_s: float) -> Iterator[float]:
        """Wait for the other threads of this process; yields the rest of the patience."""
        begun = time.monotonic()
        if not self._mutex.acquire(timeout=patience_s):
            raise IndexBusyError("another thread of this process uses the index")
        try:
            yield max(0.0, patience_s - (time.monotonic() - begun))
        finally:
            self._mutex.release()

    @contextmanager
    def _attached(self, mode: str) -> Iterator[Connection]:
        if mode == "READ_ONLY" and not os.path.lexists(self.path):
            raise IndexMissingError(f"{self.path}: no index yet")
        for suffix in _LOG_SUFFIXES:
            _require_regular(self.path.with_name(self.path.name + suffix))
        base = self._base(writes=mode == _WRITING)
        try:
            base.execute(f"ATTACH ? AS idx ({mode})", [str(self.path)])
            try:
                with self._transaction(base) as connection:
                    yield connection
            finally:
                base.execute("DETACH idx")
        except duckdb.Error as error:
            if isinstance(error, (duckdb.FatalException, duckdb.InternalException)):
                # DuckDB refuses all further work in such a database, also when the disk has recovered: open another.
                self._connections.pop(mode == _WRITING).close()
            raise self._translated(error) from error

    @contextmanager
    def _transaction(self, base: Connection) -> Iterator[Connection]:
        """Yield a new cursor. Temporary tables and views vanish with it, and without a commit the transaction is rolled
        back."""
        cursor = base.cursor()
        try:
            cursor.begin()
            yield cursor
        finally:
            cursor.close()

    def _base(self, *, writes: bool) -> Connection:
        """Return the connection of the next session. The caller holds the mutex."""
        if self._sessions[writes] >= _MAX_SESSIONS and writes in self._connections:
            self._connections.pop(writes).close()
        if writes not in self._connections:
            connection = duckdb.connect(":memory:")
            allowed = [str(self.path.with_name(self.path.name + suffix)) for suffix in _LOG_SUFFIXES]
            connection.execute("SET allowed_paths = ?", [allowed])
            for statement in (*(_REGISTRATION if writes else _QUERIES), *_LOCKED_DOWN):
                connection.execute(statement)
            self._connections[writes] = connection
            self._sessions[writes] = 0
        self._sessions[writes] += 1
        return self._connections[writes]

    def _translated(self, error: duckdb.Error) -> Exception:
        """Return the error to raise instead of DuckDB's. A foreign client that holds the file is an ordinary case; any
        other error means that the index is broken and can be rebuilt."""
        if isinstance(error, duckdb.IOException) and "Could not set lock" in str(error):
            return IndexBusyError(f"{self.path}: a foreign client holds the file")
        if isinstance(error, duckdb.IOException) and not self.path.exists():
            return IndexMissingError(f"{self.path}: no index yet")
        told = f"{self.path}: DuckDB can't use the index: {str(error).splitlines()[0]}: it is derived, so delete it or "
        told += f"run `dshistory reindex {self.path.parent}`"
        if any(words in str(error) for words in _DAMAGE):
            self._damaged = self._identity()
            return IndexDamagedError(told)
        return FormatError(told)


def _require_regular(path: Path) -> None:
    """Raise FormatError when there is anything but a regular file: DuckDB would wait at a FIFO for ever."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path}: is {what_it_is(mode)} where the index belongs, which is derived: delete it")


def tables_read(connection: Connection, sql: str) -> frozenset[str] | None:
    """Return the tables that `sql` reads, or None for all. SetupError unless it is one SELECT that reads only the
    catalog (see `check_select`)."""
    try:
        serialized = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0]
    except duckdb.Error as error:
        raise SetupError(f"the query failed: {error}") from error
    return check_select(serialized, sql=sql)


def select(connection: Connection, sql: str, params: Sequence[object] | Mapping[str, object]) -> pa.Table:
    """Return the result of one SELECT that `tables_read` has accepted. SetupError explains why it failed."""
    bound = dict(params) if isinstance(params, Mapping) else list(params)
    names = list(params) if isinstance(params, Mapping) else [repr(value) for value in params]
    try:
        return connection.sql(sql, params=bound).to_arrow_table()
    except duckdb.Error as error:
        # DuckDB finds a damaged index only when it reads the pages in question. The session translates that error.
        if type(error) is duckdb.Error or isinstance(error, (duckdb.IOException, duckdb.FatalException)):
            raise
        raise SetupError(f"the query failed: {explain_sql_error(str(error), names)}") from error


_MAX_OPEN = 4
"""Each open database has some ten threads."""

_databases: dict[Path, Database] = {}
_databases_lock = threading.Lock()


def database(paths: HistoryPaths) -> Database:
    """Return this process's database for the history at `paths`; different spellings of one root give the same
    database.

    Only the few most recently used databases stay open.
    """
    root = paths.root.resolve()
    with _databases_lock:
        wanted = _databases.pop(root, None) or Database(HistoryPaths(root))
        # Last in the dictionary: the order is that of the latest use.
        _databases[root] = wanted
        for other in list(_databases.values())[:-_MAX_OPEN]:
            other.close_if_idle()
        return wanted


def _forget_after_fork() -> None:
    """Start with no database in a forked child, because DuckDB's threads and locks do not survive a fork."""
    global _databases, _databases_lock
    # The inherited databases are never freed, not even at the end of the child: their destructors would wait for
    # threads that the child does not have, and abort.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_databases))
    _databases = {}
    _databases_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
