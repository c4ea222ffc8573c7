"""SQL of users reads the catalog and nothing else, whatever it says."""

import pickle
import threading

import pyarrow as pa
import pytest
from catalog_helpers import Piece, Run, pieces_of

from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef


@pytest.fixture
def run(tmp_path):
    with Run(tmp_path / "h", facts={"lr": 1e-3}) as run:
        run.checkpoint(0, [*pieces_of({"w": b"abcd", "b": b"x"}), Piece("rng", b"{}", "object")], loss=2.0)
        run.checkpoint(10, pieces_of({"w": b"abcd", "b": b"y"}), loss=1.0)
        yield run


@pytest.fixture
def history(run):
    return History.open(run.root)


REFUSED = [
    "COPY (SELECT 1) TO '{outside}'",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{outside}'",
    "COPY (SELECT 1) TO '{index}'",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_parquet('{manifest}')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM '{manifest}'",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "SELECT * FROM duckdb_secrets()",
    "ATTACH '{outside}' AS x",
    "ATTACH '{index}' AS x",
    "DETACH idx",
    "USE idx",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "RESET ALL",
    "PRAGMA enable_profiling",
    "EXPORT DATABASE '{outside}'",
    "CHECKPOINT",
    "CREATE TABLE t (a INTEGER)",
    "DROP TABLE idx.checkpoints",
    "DELETE FROM idx.checkpoints",
    "INSERT INTO idx.runs SELECT * FROM idx.runs",
    "WITH t AS (DELETE FROM idx.checkpoints RETURNING *) SELECT * FROM t",
    "EXPLAIN ANALYZE DELETE FROM idx.checkpoints",
    "BEGIN",
    "ROLLBACK",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW checkpoints",
    "SELECT * FROM query('DROP VIEW checkpoints')",
    "SELECT * FROM read_blob('{index}')",
    "SELECT (SELECT max(size) FROM read_blob('{index}'))",
    "WITH t AS (SELECT * FROM read_text('{index}')) SELECT * FROM t",
    "SELECT * FROM read_duckdb('{index}')",
    "SELECT * FROM query('SELECT * FROM read_blob(''{index}'')')",
    "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    "SELECT * FROM pandas_scan(12345)",
    "SELECT * FROM force_checkpoint('idx')",
    "EXPLAIN SELECT 1",
    "PIVOT metrics ON name USING sum(value)",
    "",
    "SELECT * FROM run",
    "not SQL",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_queries_that_reach_outside_the_catalog_are_refused(sql, run, history, tmp_path):
    places = {
        "outside": tmp_path / "outside",
        "index": run.root / "catalog.duckdb",
        "manifest": run.writers[0].paths.manifest("run-a", 0, 0),
    }
    before = (run.root / "catalog.duckdb").read_bytes()
    with pytest.raises(SetupError, match="query") as caught:
        history.query(sql.format(**places))
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert not (tmp_path / "outside").exists()
    assert (run.root / "catalog.duckdb").read_bytes() == before
    assert history.query("SELECT count(*) AS n FROM checkpoints").to_pylist() == [{"n": 2}]


@pytest.mark.parametrize(
    "sql", ["FROM '{index}'", "DESCRIBE '{index}'", "SUMMARIZE '{index}'", "FROM checkpoints, 'catalog.duckdb'"]
)
def test_the_index_is_not_opened_a_second_time(sql, run, history):
    """DuckDB alone would open it, because it is the one file that it may access."""
    with pytest.raises(SetupError, match="can't read files"):
        history.query(sql.format(index=run.root / "catalog.duckdb"))


def test_a_pivot_with_its_values_named_is_a_select(history):
    sql = "FROM metrics PIVOT (sum(value) FOR name IN ('loss')) ORDER BY step"
    assert history.query(sql).column("loss").to_pylist() == [2.0, 1.0]


def test_a_variable_of_the_caller_is_not_a_table(history):
    secret = pa.table({"a": [1]})
    with pytest.raises(SetupError):
        history.query("SELECT * FROM secret")
    assert secret.num_rows == 1


@pytest.mark.parametrize(
    "sql",
    [
        "FROM checkpoints",
        "DESCRIBE checkpoints",
        "SUMMARIZE metrics",
        "FROM range(3)",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 3) SELECT * FROM t",
        "VALUES (1)",
    ],
)
def test_lawful_queries_are_answered(sql, history):
    assert history.query(sql).num_rows > 0


def test_values_are_bound(history):
    name = "w'; DROP VIEW tensors; --"
    assert history.query("SELECT * FROM tensors WHERE name = ?", [name]).num_rows == 0
    assert (
        history.query("SELECT * FROM tensors WHERE name = $name AND step = $step", {"name": "w", "step": 10}).num_rows
        == 1
    )


COLUMNS = {
    "runs": "run created world_size parent_run parent_step layout facts",
    "checkpoints": "run step state created world_size layout tensors bytes new_bytes applied",
    "tensors": "run step name kind dtype shape numel nbytes placement fragments hash changed",
    "fragments": "run step rank name kind dtype shape start numel file offset nbytes checksum placement aliases "
    "codec base",
    "metrics": "run step name value ranks",
    "events": "run step time rank name detail",
    "tags": "name run step time",
    "lineage": "run step",
}


@pytest.mark.parametrize("table", COLUMNS)
def test_columns_and_types_do_not_depend_on_where_the_rows_are(table, run, history):
    indexed = history.query(f"SELECT * FROM {table}").schema
    assert indexed.names == COLUMNS[table].split()
    (run.root / "catalog.duckdb").unlink()
    assert history.query(f"SELECT * FROM {table}").schema == indexed
    empty = run.root.parent / "empty"
    with Run(empty, "run-b"):
        assert History.open(empty).query(f"SELECT * FROM {table} LIMIT 0").schema == indexed


def test_changed_and_hash(history):
    rows = history.query("SELECT step, name, changed FROM tensors ORDER BY step, name").to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0, "b", None), (0, "w", None), (10, "b", True), (10, "w", False)]
    assert history.query("SELECT count(*) AS n FROM fragments WHERE kind = 'object'").to_pylist() == [{"n": 1}]


def test_metrics_are_averaged_over_ranks_and_the_last_value_of_a_rank_counts(tmp_path):
    with Run(tmp_path / "h", world_size=2) as run:
        for rank, values in enumerate(([5.0, 1.0], [float("nan"), 3.0])):
            for value in values:
                run.writers[rank].journal.metric(7, "loss", value)
            run.writers[rank].journal.flush()
        history = History.open(tmp_path / "h")
        expected = [{"run": "run-a", "step": 7, "name": "loss", "value": 2.0, "ranks": 2}]
        assert history.query("SELECT * FROM metrics").to_pylist() == expected
        run.register(patience_s=10)
        assert history.query("SELECT * FROM metrics").to_pylist() == expected


def test_applied_is_known_where_the_metric_is(run, history):
    run.writers[0].journal.metric(10, "applied", 1.0)
    run.writers[0].journal.flush()
    rows = history.query("SELECT step, applied FROM checkpoints ORDER BY step").to_pylist()
    assert rows == [{"step": 0, "applied": None}, {"step": 10, "applied": True}]


def test_states(run, history):
    writer = run.writers[0]
    writer.begin(20)
    tmp = writer.begin(30)
    tmp.write_bytes(b"half")
    writer.discard(30, reason="disk full")
    writer.journal.flush()
    states = "SELECT step, state FROM checkpoints ORDER BY step"
    expected = {0: "committed", 10: "committed", 20: "pending", 30: "failed"}
    assert {row["step"]: row["state"] for row in history.query(states).to_pylist()} == expected
    assert {step: history.state("run-a", step) for step in expected} == expected
    assert not tmp.exists()
    run.close()
    assert history.state("run-a", 20) == "incomplete"
    with pytest.raises(NotFoundError):
        history.state("run-a", 40)
    assert history.checkpoints(state="failed") == [CheckpointRef("run-a", 30)]
    assert history.checkpoints() == [CheckpointRef("run-a", 0), CheckpointRef("run-a", 10)]


def test_threads_query_one_history_at_once(history):
    found = []

    def ask():
        for _ in range(5):
            found.append(history.query("SELECT count(*) AS n FROM tensors").to_pylist())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[{"n": 4}]] * 20
