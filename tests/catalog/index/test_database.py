"""The database itself refuses SQL that could harm the machine, whichever way the SQL arrives."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from catalog_helpers import Run, pieces_of

from catalog.errors import FormatError
from catalog.index import database as opener
from catalog.index.database import database
from catalog.index.fair_lock import FairLock, IndexBusyError
from catalog.index.index import query, register, reindex
from catalog.paths import HistoryPaths


@pytest.fixture
def paths(tmp_path):
    with Run(tmp_path / "h") as run:
        run.checkpoint(0, pieces_of({"w": b"a"}))
    return HistoryPaths(tmp_path / "h")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM '{root}/runs/run-a/steps/000000000000/rank-00000.manifest.parquet'",
        "COPY (SELECT 1) TO '{root}/outside'",
        "ATTACH '{root}/other.duckdb' AS other",
        "EXPORT DATABASE '{root}/outside'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['/etc/passwd']",
        "SET lock_configuration = false",
        "DELETE FROM idx.checkpoints",
        "CREATE TABLE idx.t (a INTEGER)",
    ],
)
def test_the_database_refuses_harmful_sql(sql, paths):
    with (
        pytest.raises(FormatError),
        database(paths).reading(patience_s=10) as connection,
    ):
        connection.execute(sql.format(root=paths.root))
    assert not (paths.root / "outside").exists()


def test_a_python_variable_is_not_a_table(paths):
    secret = pa.table({"a": [1]})
    with (
        pytest.raises(FormatError, match="secret does not exist"),
        database(paths).reading(patience_s=10) as connection,
    ):
        connection.execute("SELECT * FROM secret")
    assert secret.num_rows == 1


def test_one_database_for_one_history(paths, tmp_path):
    (tmp_path / "link").symlink_to(paths.root)
    assert database(paths) is database(HistoryPaths(tmp_path / "link"))


def test_tables_made_while_reading_are_gone_afterwards(paths):
    with database(paths).reading(patience_s=10) as connection:
        connection.execute("CREATE TEMP TABLE mine AS SELECT 1")
        connection.execute("CREATE TABLE memory.ours AS SELECT 1")
    with database(paths).detached() as connection:
        names = connection.execute(
            "SELECT table_name FROM duckdb_tables() UNION SELECT database_name FROM duckdb_databases()"
        )
        assert not {"mine", "ours", "idx"} & {name for (name,) in names.fetchall()}


def test_a_transaction_that_fails_leaves_the_index_as_it_was(paths):
    def fail():
        with database(paths).writing(patience_s=10) as connection:
            connection.execute("DELETE FROM idx.checkpoints")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with database(paths).reading(patience_s=10) as connection:
        assert connection.execute("SELECT count(*) FROM idx.checkpoints").fetchall() == [(1,)]


def test_registering_waits_no_longer_than_its_patience(paths):
    """The lock is held in every way: by a reader, by a writer, and by a thread of this process."""
    lock = FairLock(queue=paths.index_queue_lock, access=paths.index_access_lock)
    with lock.reading(patience_s=0):
        assert register(paths, patience_s=0.01) == 0
    with lock.writing(patience_s=0):
        assert register(paths, patience_s=0.01) == 0
        with pytest.raises(IndexBusyError), database(paths).reading(patience_s=0.01):
            pass
    with database(paths).detached():
        assert register(paths, patience_s=0.01) == 0


def test_an_index_of_another_history_is_refused(paths, tmp_path):
    with Run(tmp_path / "other") as run:
        run.checkpoint(7, pieces_of({"w": b"b"}))
    (tmp_path / "other" / "catalog.duckdb").replace(paths.catalog_db)
    for call in (lambda: register(paths, patience_s=10), lambda: query(paths, "FROM runs")):
        with pytest.raises(FormatError, match="another history"):
            call()
    assert reindex(paths) == 1
    assert query(paths, "SELECT step FROM checkpoints").to_pylist() == [{"step": 0}]


def test_many_histories_hold_the_threads_of_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(opener, "_databases", {})

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def look(number: int) -> int:
        return query(HistoryPaths(tmp_path / f"h{number}"), "SELECT * FROM tensors").num_rows

    before = threads()
    for number in range(12):
        with Run(tmp_path / f"h{number}") as run:
            run.checkpoint(0, pieces_of({"w": b"a"}))
        assert look(number) == 1
        if number == 0:
            each = threads() - before
            assert each >= 1
    assert [look(number) for number in range(12)] == [1] * 12
    assert threads() - before <= 5 * each
    assert look(0) == 1, "one that has rested wakes"


def test_a_registration_leaves_the_training_its_free_memory(paths):
    """Memory that a training has freed and takes again at its next step stays with the process."""
    paths.catalog_db.unlink()
    done = subprocess.run([sys.executable, "-c", FREE_MEMORY, str(paths.root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    freed, kept = map(int, done.stdout.split())
    assert kept > freed - FREED_BYTES / 2


FREED_BYTES = 96 << 20
FREE_MEMORY = f"""
import ctypes, os, sys, time
from pathlib import Path

from catalog.index.index import register
from catalog.paths import HistoryPaths

libc, block_bytes = ctypes.CDLL(None), 60_000
libc.malloc.restype = ctypes.c_void_p

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

history = HistoryPaths(Path(sys.argv[1]))
assert register(history, patience_s=10) == 1
blocks = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(block_bytes))) for _ in range({FREED_BYTES} // block_bytes)]
for block in blocks:
    ctypes.memset(block, 1, block_bytes)
for block in blocks[:-1]:  # what lies below a block in use is not given back by `free` itself
    libc.free(block)
freed = resident()
register(history, patience_s=10)
time.sleep(1)  # a thread of DuckDB waits half a second before it gives memory back
print(freed, resident())
"""


@pytest.mark.parametrize("session", ["query(history, 'FROM runs')", "register(history, patience_s=10)"])
def test_many_sessions_take_no_more_memory_than_a_few(paths, session):
    """DuckDB keeps some KiB of each session until its database is closed, and a training registers for weeks."""
    program = MANY_SESSIONS.replace("SESSION()", session)
    done = subprocess.run([sys.executable, "-c", program, str(paths.root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, many = map(int, done.stdout.split())
    assert many < few + (128 << 10)


MANY_SESSIONS = """
import ctypes, sys
from pathlib import Path

from catalog.index import database
from catalog.index.index import query, register
from catalog.paths import HistoryPaths

class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Allocated

def allocated(sessions):
    for _ in range(sessions):
        SESSION()
    found = libc.mallinfo2()
    return found.uordblks + found.hblkhd

database._MAX_SESSIONS = 20
history = HistoryPaths(Path(sys.argv[1]))
print(allocated(120), allocated(120))
"""
