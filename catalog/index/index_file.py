"""The contents of the index file while it is attached: its version, the list of what it has, and insertions.

Every function runs inside the caller's transaction, in which the index is attached as `idx`.
"""

from typing import Any

from catalog.errors import FormatError
from catalog.format.json_facts import read_history_json
from catalog.index.database import Connection
from catalog.index.schema import MIGRATIONS, TABLES, VERSION, changed_statement
from catalog.index.unindexed import Ingested, Unindexed
from catalog.paths import HistoryPaths

__all__ = ["ingested_in", "insert", "is_current", "migrate"]


def ingested_in(connection: Connection) -> Ingested:
    """Return the steps, statistics, journal segments and audits that the attached index has."""

    def by_run(table: str, column: str) -> dict[str, frozenset[Any]]:
        rows = connection.execute(f"SELECT run, list({column}) FROM idx.{table} GROUP BY run").fetchall()
        return {run: frozenset(values) for run, values in rows}

    return Ingested(
        steps=by_run("checkpoints", "step"),
        analyses=by_run("analyses", "step"),
        segments=by_run("segments", "segment"),
        audits=by_run("audits", "audit"),
        runs=frozenset(run for (run,) in connection.execute("SELECT run FROM idx.runs").fetchall()),
    )


def _version(connection: Connection, paths: HistoryPaths) -> int:
    """Return the version of the attached index, 0 for an empty one. FormatError when a newer release or another history
    wrote it."""
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
            f"{paths.catalog_db}: table meta: uuid {uuid} is that of another history; rebuild the index with "
            f"`dshistory reindex {paths.root}`"
        )
    return int(version)


def is_current(connection: Connection, paths: HistoryPaths) -> bool:
    """Return whether the attached index has this release's version. A reader ignores an older one, and the next writer
    migrates it. FormatError when a newer release or another history wrote it."""
    return _version(connection, paths) == VERSION


def migrate(connection: Connection, paths: HistoryPaths) -> None:
    """Bring the attached index, which may be empty, to this release's version. FormatError as in `is_current`."""
    version = _version(connection, paths)
    if version == VERSION:
        return
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute("DELETE FROM idx.meta")
    connection.execute("INSERT INTO idx.meta VALUES (?, ?)", [VERSION, read_history_json(paths)["uuid"]])


def insert(connection: Connection, unindexed: Unindexed) -> None:
    """Delete the stale rows from the attached index and insert the unindexed ones. FormatError when DuckDB does not
    insert exactly these: the transaction must not be committed then.
    """
    new = unindexed.new()
    tables = unindexed.tables(new)
    for name, table in tables.items():
        # To register one takes a third of a millisecond. Only the view of changed tensors reads one that may be empty.
        if table.num_rows or name == "previous_steps":
            connection.register(name, table)
    if unindexed.removed_runs:
        for table in TABLES:
            connection.execute(f"DELETE FROM idx.{table} WHERE run IN (SELECT run FROM removed_runs)")
    if unindexed.stale_steps:
        for table in ("checkpoints", "tensors", "fragments"):
            connection.execute(f"DELETE FROM idx.{table} WHERE (run, step) IN (SELECT (run, step) FROM stale_steps)")
    if unindexed.stale_statistics:
        for table in ("statistics", "sketches", "analyses"):
            connection.execute(
                f"DELETE FROM idx.{table} WHERE (run, step) IN (SELECT (run, step) FROM stale_statistics)"
            )
    if unindexed.stale_segments:
        connection.execute(
            "DELETE FROM idx.segments WHERE (run, segment) IN (SELECT (run, segment) FROM stale_segments)"
        )
    if "tensors" in new:
        connection.execute(changed_statement(indexed=True, hiding=False, before=unindexed.before()))
    for name in sorted(new):
        source = "unindexed_changed" if name == "tensors" else f"unindexed_{name}"
        (inserted,) = connection.execute(f"INSERT INTO idx.{name} SELECT * FROM {source}").fetchone() or (0,)
        expected = tables[f"unindexed_{name}"].num_rows
        if inserted != expected:
            raise FormatError(f"table {name} of the index: DuckDB has inserted {inserted} rows, {expected} were given")
