"""The tables of the index and the views that users see.

The index has the tables `idx.*`. Every query gets temporary views of its own, which combine the rows of the index with
the unindexed ones (`catalog.index.unindexed`). Both halves come from the same Arrow schemas, so their types agree.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import pyarrow as pa

from catalog.format.audit_file import SCHEMA as AUDIT
from catalog.format.extents import SCHEMA as MANIFEST
from catalog.read.tensors import SCHEMA as LOGICAL

__all__ = ["MIGRATIONS", "TABLES", "VERSION", "VIEWS", "changed_statement", "create_statement", "view_statements"]

_INSTANT = pa.timestamp("us", tz="UTC")
_KEY = [("run", pa.string()), ("step", pa.int64())]

TABLES: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "runs": pa.schema(
            [
                ("run", pa.string()),
                ("created", _INSTANT),
                ("world_size", pa.int64()),
                ("parent_run", pa.string()),
                ("parent_step", pa.int64()),
                ("layout", pa.string()),
                ("facts", pa.string()),
            ]
        ),
        "checkpoints": pa.schema(
            [
                *_KEY,
                ("created", _INSTANT),
                ("world_size", pa.int64()),
                ("layout", pa.string()),
                ("tensors", pa.int64()),
                ("bytes", pa.int64()),
                ("new_bytes", pa.int64()),
            ]
        ),
        "tensors": pa.schema(
            [
                *_KEY,
                *((name, LOGICAL.field(name).type) for name in LOGICAL.names if name != "covered"),
            ]
        ),
        "fragments": pa.schema(
            [
                *_KEY,
                ("rank", pa.int64()),
                *((name, {"checksum": pa.binary()}.get(name, MANIFEST.field(name).type)) for name in MANIFEST.names),
            ]
        ),
        "journal": pa.schema(
            [
                ("run", pa.string()),
                ("kind", pa.string()),
                ("step", pa.int64()),
                ("rank", pa.int64()),
                ("name", pa.string()),
                ("value", pa.float64()),
                ("detail", pa.string()),
                ("time", _INSTANT),
            ]
        ),
        "segments": pa.schema([("run", pa.string()), ("segment", pa.string())]),
        "statistics": pa.schema(
            [
                *_KEY,
                ("name", pa.string()),
                ("kind", pa.string()),
                *((name, pa.int64()) for name in ("numel", "nan", "inf", "zeros")),
                *((name, pa.float64()) for name in ("min", "max", "sum", "sum_of_squares")),
                ("exponents", pa.list_(pa.int64())),
                ("since", pa.int64()),
                *((name, pa.float64()) for name in ("norm_before", "update_norm", "cosine")),
            ]
        ),
        "sketches": pa.schema(
            [*_KEY, ("name", pa.string()), ("kind", pa.string()), ("sketch", pa.list_(pa.float32()))]
        ),
        "analyses": pa.schema(_KEY),
        "audit": pa.schema([*_KEY, *((name, AUDIT.field(name).type) for name in AUDIT.names)]),
        "audits": pa.schema([("run", pa.string()), ("audit", pa.string())]),
    }
)
"""Each table with the columns that unindexed rows have."""

_TYPES = {
    pa.string(): "VARCHAR",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.float32(): "FLOAT",
    pa.binary(): "BLOB",
    pa.bool_(): "BOOLEAN",
    _INSTANT: "TIMESTAMP WITH TIME ZONE",
    pa.list_(pa.int64()): "BIGINT[]",
}
_COMPUTED = {"tensors": {"changed": "BOOLEAN"}}
"""Columns that registration computes from the rows themselves."""


def _column_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return _column_type(kind.value_type) + "[]"
    return _TYPES[kind]


def create_statement(table: str) -> str:
    """Return the CREATE TABLE statement of an index table. Every type is declared; none is inferred from rows."""
    columns = {field.name: _column_type(field.type) for field in TABLES[table]} | _COMPUTED.get(table, {})
    definitions = ", ".join(f'"{name}" {kind}' for name, kind in columns.items())
    return f"CREATE TABLE idx.{table} ({definitions})"


_STATISTICS_TABLES = ("statistics", "sketches", "analyses")
_AUDIT_TABLES = ("audit", "audits")

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE idx.meta (version BIGINT NOT NULL, uuid VARCHAR NOT NULL)",
        *(create_statement(table) for table in TABLES if table not in _STATISTICS_TABLES + _AUDIT_TABLES),
    ),
    tuple(create_statement(table) for table in _STATISTICS_TABLES),
    # Adds the updates since the analyzed checkpoint before; the next registration fills them from the statistics files.
    (*(f"DROP TABLE idx.{table}" for table in _STATISTICS_TABLES),)
    + tuple(create_statement(table) for table in _STATISTICS_TABLES),
    tuple(create_statement(table) for table in _AUDIT_TABLES),
    # Knows audits by the names of their files, of which a step may have several.
    (*(f"DROP TABLE idx.{table}" for table in _AUDIT_TABLES),)
    + tuple(create_statement(table) for table in _AUDIT_TABLES),
)
"""Entry n holds the statements that migrate an index from version n to n + 1.

When the columns of a table change, a new entry drops the table and creates it from `TABLES`: its rows come from the
files again, so a migrated index and a new one are equal.
"""

VERSION = len(MIGRATIONS)

VIEWS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "runs": (
            ("runs",),
            "SELECT run, created, world_size, parent_run, parent_step, layout, facts::JSON AS facts FROM all_runs",
        ),
        "fragments": (("fragments",), "SELECT * FROM all_fragments"),
        "tensors": (("tensors",), "SELECT * FROM all_tensors"),
        "statistics": (
            ("statistics",),
            # The formulas of `dshistory.metrics`, which this layer may not import; tests/dshistory/test_metrics_sql.py
            # holds both to equal figures on the same data.
            """
            SELECT *, numel - nan - inf AS finite, sqrt(sum_of_squares) AS norm,
                   sqrt(sum_of_squares / nullif(numel - nan - inf, 0)) AS rms,
                   sum / nullif(numel - nan - inf, 0) AS mean,
                   CASE WHEN norm_before > 0 THEN update_norm / norm_before WHEN update_norm > 0 THEN 'inf'::DOUBLE
                        ELSE update_norm END AS relative_update
            FROM all_statistics
            """,
        ),
        "sketches": (("sketches",), "SELECT * FROM all_sketches"),
        "audit": (
            ("audit",),
            # Of a step that was audited against several, what is known against the nearest one says most.
            "SELECT * FROM all_audit QUALIFY since = max(since) OVER (PARTITION BY run, step)",
        ),
        "metrics": (
            ("journal",),
            """
            SELECT run, step, name, avg(value) AS value, count(*) AS ranks
            FROM (SELECT run, step, name, rank, arg_max(value, time) AS value FROM all_journal
                  WHERE kind = 'metric' GROUP BY run, step, name, rank)
            GROUP BY run, step, name
            """,
        ),
        "events": (
            ("journal",),
            """
            SELECT run, step, time, rank, name, detail FROM all_journal WHERE kind = 'event'
            UNION ALL SELECT run, step, NULL, NULL, 'damaged', detail FROM damaged_files
            """,
        ),
        "tags": (
            ("journal",),
            """
            SELECT name, run, step, time FROM all_journal WHERE kind = 'tag'
            QUALIFY row_number() OVER (PARTITION BY name ORDER BY time DESC, run DESC) = 1
            """,
        ),
        "lineage": (
            ("runs", "checkpoints", "journal"),
            # In the order of `catalog.read.run_order`. A damaged history may name a run as its own ancestor.
            """
            WITH RECURSIVE ancestors AS (
                SELECT run, parent_run, parent_step, NULL::BIGINT AS last_step, 1 AS depth FROM (
                    FROM all_runs WHERE coalesce(facts::JSON->>'replay', 'false') = 'false'
                    ORDER BY coalesce(TRY_CAST(facts::JSON->>'number' AS BIGINT), 0) DESC, created DESC, run DESC
                    LIMIT 1
                )
                UNION ALL
                SELECT r.run, r.parent_run, r.parent_step, least(a.last_step, a.parent_step), a.depth + 1
                FROM ancestors a JOIN all_runs r ON r.run = a.parent_run
                WHERE a.depth < (SELECT count(*) FROM all_runs)
            )
            SELECT s.run, s.step FROM ancestors a JOIN (
                SELECT run, step FROM all_checkpoints
                UNION SELECT run, step FROM all_journal WHERE kind = 'metric'
            ) s ON s.run = a.run AND (a.last_step IS NULL OR s.step <= a.last_step)
            QUALIFY row_number() OVER (PARTITION BY s.step ORDER BY a.depth) = 1
            """,
        ),
        "checkpoints": (
            ("checkpoints", "journal"),
            """
            WITH applied AS (SELECT run, step, bool_or(value > 0) AS applied FROM all_journal
                             WHERE kind = 'metric' AND name = 'applied' GROUP BY run, step),
            begun AS (SELECT run, step, state FROM uncommitted_steps
                      UNION ALL SELECT run, step, CASE name WHEN 'failed' THEN 'failed' ELSE 'incomplete' END
                      FROM all_journal WHERE kind = 'event' AND name IN ('failed', 'collected') AND step IS NOT NULL)
            SELECT run, step, 'committed' AS state, created, world_size, layout, tensors, bytes, new_bytes, applied
            FROM all_checkpoints LEFT JOIN applied USING (run, step)
            UNION ALL
            SELECT run, step, CASE WHEN bool_or(state = 'failed') THEN 'failed' ELSE any_value(state) END,
                   NULL, NULL, NULL, NULL, NULL, NULL, NULL
            FROM begun WHERE (run, step) NOT IN (SELECT (run, step) FROM all_checkpoints) GROUP BY run, step
            """,
        ),
    }
)
"""Each view with the tables that it reads and its SELECT, in which `all_<table>` is the index and the unindexed
rows."""


def view_statements(
    names: frozenset[str] | None, *, indexed: bool, hiding: bool, new: Collection[str], before: Collection[int]
) -> list[str]:
    """Return the statements that create the views of one query.

    - `names`: the views that the query reads, since each one costs time; None for all of them.
    - `indexed`: whether the index is attached.
    - `hiding`: whether some indexed rows are stale (tables stale_runs, stale_steps and stale_statistics), so that they
      must be hidden.
    - `new`: the tables with unindexed rows; without an index this must be all of them.
    - `before`: see `changed_statement`.
    """
    wanted = [name for name in VIEWS if names is None or not names <= VIEWS.keys() or name in names]
    needed = {table for name in wanted for table in VIEWS[name][0]}
    statements = []
    for table in (table for table in TABLES if table in needed):
        halves = [f"SELECT * FROM idx.{table}{_visible(table) if hiding else ''}"] if indexed else []
        if table in new:
            unindexed = f"unindexed_{table}"
            if table == "tensors":
                unindexed = "unindexed_changed"
                statements.append(changed_statement(indexed=indexed, hiding=hiding, before=before))
            halves.append(f"SELECT * FROM {unindexed}")
        statements.append(f"CREATE OR REPLACE TEMP VIEW all_{table} AS {' UNION ALL '.join(halves)}")
    return statements + [f"CREATE OR REPLACE TEMP VIEW {name} AS {VIEWS[name][1]}" for name in wanted]


def changed_statement(*, indexed: bool, hiding: bool, before: Collection[int]) -> str:
    """Return the statement that creates the view unindexed_changed: the unindexed tensors with the column `changed`.

    `changed` says whether a tensor's bytes differ from those in the checkpoint before it in the run. It is true for a
    tensor that the checkpoint before does not have, and null without a checkpoint before. `before` are the steps in the
    column `previous` of previous_steps: since the statement lists them one by one, DuckDB reads only their rows of the
    index.
    """
    rows = "SELECT run, step, kind, name, hash FROM unindexed_tensors"
    if indexed and before:
        visible = _visible("tensors") if hiding else " WHERE true"
        steps = ", ".join(str(int(step)) for step in sorted(before))
        rows += f" UNION ALL SELECT run, step, kind, name, hash FROM idx.tensors{visible} AND step IN ({steps})"
    return f"""
    CREATE OR REPLACE TEMP VIEW unindexed_changed AS
    SELECT t.*, CASE WHEN p.previous IS NULL THEN NULL ELSE q.hash IS DISTINCT FROM t.hash END AS changed
    FROM unindexed_tensors t
    LEFT JOIN previous_steps p ON p.run = t.run AND p.step = t.step
    LEFT JOIN ({rows}) q ON q.run = p.run AND q.step = p.previous AND q.kind = t.kind AND q.name = t.name
    """


def _visible(table: str) -> str:
    condition = " WHERE run NOT IN (SELECT run FROM stale_runs)"
    if table in ("checkpoints", "tensors", "fragments"):
        condition += " AND (run, step) NOT IN (SELECT (run, step) FROM stale_steps)"
    if table in _STATISTICS_TABLES:
        condition += " AND (run, step) NOT IN (SELECT (run, step) FROM stale_statistics)"
    return condition
