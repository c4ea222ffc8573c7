"""Queries of the notebook are prepared before they run: options, bound variables, and saved queries as CTEs."""

from pathlib import Path

import pytest

from dshistory.commands.parameters import UsageError
from dshistory.commands.sql_cell import SavedQueries, bound, parse_head, read, take_target, unquoted


@pytest.mark.parametrize(
    ("rest", "left", "target", "shows"),
    [
        ("rows <<", "", "rows", False),
        ("rows<<", "", "rows", False),
        ("rows= <<", "", "rows", True),
        ("rows =<<", "", "rows", True),
        ("--save a rows << ", "--save a  ", "rows", False),
        ("--save a", "--save a", None, True),
    ],
)
def test_the_target_of_a_cell(rest: str, left: str, target: str | None, shows: bool) -> None:
    assert take_target(rest) == (left, target, shows)


def test_a_target_must_be_a_name() -> None:
    for rest in ("1x <<", "<<", "a-b <<"):
        with pytest.raises(UsageError, match="not a name for a variable"):
            take_target(rest)


def test_options_are_those_of_jupysql() -> None:
    head = parse_head(["-S", "a", "-w", "b", "--with", "c", "-N", "-f", "q.sql", "-C", "somewhere"])
    assert (head.save, head.with_, head.execute, head.file) == ("a", ("b", "c"), False, Path("q.sql"))
    assert head.words == ("-C", "somewhere")
    with pytest.raises(UsageError, match="'a-b' is not a name for a saved query"):
        parse_head(["--save", "a-b"])
    with pytest.raises(UsageError, match="expected one argument"):
        parse_head(["--save"])


def test_a_query_without_quotes_is_found_in_its_line() -> None:
    assert unquoted("SELECT * FROM runs WHERE run = 'x'") == ("", "SELECT * FROM runs WHERE run = 'x'")
    assert unquoted("rows << from runs") == ("rows << ", "from runs")
    assert unquoted("--with a WITH b AS (SELECT 1) FROM b") == ("--with a ", "WITH b AS (SELECT 1) FROM b")
    assert unquoted("'SELECT 1 << 2'") is None
    assert unquoted("--with from_here") is None


@pytest.mark.parametrize(
    ("query", "text", "values"),
    [
        ("SELECT $x", "SELECT $x", {"x": 3}),
        ("SELECT {{x}}, {{ x }}", "SELECT $x, $x", {"x": 3}),
        ("SELECT $x, $low", "SELECT $x, $low", {"x": 3}),
        ("SELECT '{{name}}'", "SELECT (CAST($name AS VARCHAR))", {"name": "'; --"}),
        ("SELECT '%{{name}}%'", "SELECT ('%' || CAST($name AS VARCHAR) || '%')", {"name": "'; --"}),
        ("SELECT 'it''s $y', \"$y\" -- $y\n/* $y */", "SELECT 'it''s $y', \"$y\" -- $y\n/* $y */", {}),
        ("SELECT $$ $x $$, $a$ $x $a$", "SELECT $$ $x $$, $a$ $x $a$", {}),
    ],
)
def test_variables_become_parameters(query: str, text: str, values: dict[str, object]) -> None:
    assert bound(query, {"x": 3, "name": "'; --", "low": 1}, {"low": 0}) == (text, values)


def test_columns_and_arrays_become_lists() -> None:
    import numpy as np
    import pyarrow as pa

    namespace = {"a": np.arange(2), "b": np.float32(0.5), "c": pa.chunked_array([[1], [2]])}
    assert bound("SELECT $a, $b, $c", namespace, {})[1] == {"a": [0, 1], "b": 0.5, "c": [1, 2]}


def test_an_unknown_variable_is_reported_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no variable 'stpe' for the query; the nearest is step"):
        bound("SELECT $stpe", {"step": 1, "other": 2}, {})
    with pytest.raises(UsageError, match="'step' stands for a value, not for a table"):
        bound("SELECT * FROM {{step}}", {"step": 1}, {})
    with pytest.raises(UsageError, match=r"'\$step' in quotes is literal text"):
        bound("SELECT '$step'", {"step": 1}, {})


def test_saved_queries_become_tables() -> None:
    saved = SavedQueries()
    saved.save("late", "SELECT * FROM metrics WHERE step > 5; ")
    saved.save("losses", "SELECT * FROM late WHERE name = 'loss' -- only these")
    late = '"late" AS (\nSELECT * FROM metrics WHERE step > 5\n)'
    losses = "\"losses\" AS (\nSELECT * FROM late WHERE name = 'loss' -- only these\n)"
    assert saved.composed("SELECT * FROM losses") == f"WITH {late}, {losses}\nSELECT * FROM losses"
    assert saved.composed("SELECT 1", with_=("late",)) == f"WITH {late}\nSELECT 1"
    assert saved.composed("SELECT 'losses' -- late") == "SELECT 'losses' -- late"
    assert saved.composed("-- first\nWITH a AS (FROM late) FROM a") == f"WITH {late}, a AS (FROM late) FROM a"
    assert saved.composed("WITH RECURSIVE a AS (FROM late) FROM a").startswith(f"WITH RECURSIVE {late}, a")
    assert saved.names == ("late", "losses")


def test_a_query_that_cannot_be_saved_or_read_says_why() -> None:
    saved = SavedQueries()
    with pytest.raises(UsageError, match="'Metrics' is a table of the catalog"):
        saved.save("Metrics", "SELECT 1")
    with pytest.raises(UsageError, match="reads 'a' and cannot be saved under the same name"):
        saved.save("a", "SELECT * FROM a")
    saved.save("late", "FROM early")
    saved.save("early", "FROM late")
    with pytest.raises(UsageError, match="late reads early reads late"):
        saved.composed("FROM late")
    with pytest.raises(UsageError, match="no query was saved as 'lat'; the nearest is late"):
        saved.composed("SELECT 1", with_=("lat",))


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("SELECT 1")
    assert read(tmp_path / "q.sql") == "SELECT 1"
    with pytest.raises(UsageError, match=r"--file .*none\.sql: .*No such file"):
        read(tmp_path / "none.sql")
