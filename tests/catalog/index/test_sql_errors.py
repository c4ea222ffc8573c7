"""A failed query gives one line with the nearest table, column or function."""

from pathlib import Path

import pytest
from catalog_helpers import Run, pieces_of

from catalog.errors import SetupError
from catalog.history import History


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    root: Path = tmp_path_factory.mktemp("explanation") / "history"
    with Run(root) as run:
        run.checkpoint(0, pieces_of({"w": b"1"}), loss=3.0)
    return History.open(root)


@pytest.mark.parametrize(
    ("sql", "params", "expected"),
    [
        ("SELECT * FROM chekpoints", {}, "no table 'chekpoints'; the nearest is checkpoints; the tables are runs,"),
        ("SELECT 1 FROM zzz", {}, "no table 'zzz'; the tables are runs,"),
        ("SELECT stp FROM checkpoints", {}, "no column 'stp'; the nearest is step"),
        ("SELECT 1 FROM metrics WHERE name = loss", {}, "no column 'loss'; text goes in single quotes: 'loss'"),
        ("SELECT c.stp FROM checkpoints c JOIN runs r USING (run)", {}, "c has no column 'stp'; the nearest is step"),
        ("SELECT x.step FROM checkpoints", {}, "'x' is none of its tables, which are checkpoints"),
        ("SELECT list_sun([1])", {}, "no function list_sun(); the nearest is list_sum"),
        ("SELECT $a, $b", {}, "no value for $a, $b: pass it by name, as sql(query, a=...)"),
        ("SELECT $a", {"a": object()}, "a value of type object can't stand in a query"),
        ("SELECT 1", {"extra": 1}, "0 places for values, and 1 were passed: extra"),
        ("SELECT $a + 1", {"a": "x"}, "explicit type casts"),
        ("SELECT cast('x' AS int)", {}, "Could not convert string 'x'"),
        ("SELEC 1", {}, 'can\'t be read as SQL: syntax error at or near "SELEC"'),
        ("DROP TABLE runs", {}, "the catalog can only be read"),
    ],
)
def test_a_failed_query_gives_a_one_line_error(
    history: History, sql: str, params: dict[str, object], expected: str
) -> None:
    with pytest.raises(SetupError) as caught:
        history.query(sql, params)
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert "LINE 1" not in str(caught.value)


def test_show_tables_lists_what_can_be_asked(history: History) -> None:
    names = history.query("show tables;")["name"].to_pylist()
    assert names == [
        "audit",
        "checkpoints",
        "events",
        "fragments",
        "lineage",
        "metrics",
        "runs",
        "sketches",
        "statistics",
        "tags",
        "tensors",
    ]
    for name in names:
        assert history.query(f"DESCRIBE {name}").num_rows
