"""Tables show rows as text, HTML and exports, and the rows behind them stay exact."""

import csv
import io
import json
import math
import re
import sys
from datetime import UTC, datetime

import duckdb
import pyarrow as pa
import pytest

from catalog.errors import NotFoundError, SetupError
from dshistory.display import text
from dshistory.display.formats import text_of
from dshistory.display.report import Report
from dshistory.display.table import Table

HOSTILE = "<script>alert(1)</script>\n\x1b[31m"


def numbers(rows: int) -> Table:
    return Table(
        pa.table({"step": list(range(rows)), "bytes": [1024 * i for i in range(rows)]}), formats={"bytes": "bytes"}
    )


def test_any_reader_of_arrow_accepts_a_table() -> None:
    rows = numbers(3)
    assert pa.table(rows).equals(rows.to_arrow())
    with duckdb.connect() as connection:
        assert connection.sql("SELECT sum(step) FROM rows").fetchall() == [(3,)]


def test_rows_columns_and_slices() -> None:
    table = numbers(5)
    assert len(table) == 5
    assert table.columns == ("step", "bytes")
    assert table["step"].to_pylist() == [0, 1, 2, 3, 4]
    assert table[0] == {"step": 0, "bytes": 0}
    assert table[-1]["step"] == 4
    assert [row["step"] for row in table[1:3]] == [1, 2]
    assert [row["step"] for row in table[::-2]] == [4, 2, 0]
    assert [row["step"] for row in table.top(2)] == [0, 1]
    assert len(table.top(100)) == 5
    assert table.top(2).formats == table.formats
    assert list(table.to_pandas()["step"]) == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        table[5]


def test_an_unknown_column_names_those_there_are() -> None:
    with pytest.raises(NotFoundError, match=r"'loss'.*step, bytes"):
        numbers(1)["loss"]


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SetupError, match=r"\[notebook\]"):
        numbers(1).to_pandas()


def test_text_is_aligned_and_in_units() -> None:
    table = Table(
        pa.table({"name": ["a", "long.name"], "bytes": [512, 3 * 1024**3], "share": [0.00001, 1.0]}),
        formats={"bytes": "bytes", "share": "share"},
        note="two rows",
    )
    assert repr(table).splitlines() == [
        "name         bytes   share",
        "---------  -------  ------",
        "a            512 B   <0.1%",
        "long.name  3.0 GiB  100.0%",
        "two rows",
    ]


def test_large_tables_page_and_say_what_they_leave_out() -> None:
    for shown in (repr(numbers(1000)), numbers(1000)._repr_html_()):
        assert "975 rows left out" in shown
        assert len(re.findall(r"KiB", shown)) == 24
        assert "999.0 KiB" in shown
    assert "left out" not in repr(numbers(30))
    assert len(repr(numbers(30)).splitlines()) == 32


def test_long_names_lose_their_middle_and_messages_nothing() -> None:
    name, message = "a" + 200 * "." + "z", 300 * "m"
    table = Table(pa.table({"name": [name], "message": [message]}))
    _, _, row, hint = repr(table).splitlines()
    assert row.startswith("a.")
    assert row.endswith(f".z  {message}")
    assert len(row) == 96 + 2 + 300
    assert hint.startswith("… replaces the middle of long values")
    assert name in table._repr_html_()


def test_its_whole_text_shortens_nothing() -> None:
    assert len(numbers(1000).to_text().splitlines()) == 1002
    name = "a" + 200 * "." + "z"
    table = Table(pa.table({"name": [name], "message": ["m"]}))
    assert table.to_text().splitlines()[-1] == f"{name}  m"


def test_a_hundred_thousand_rows_are_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    table = numbers(100_000)
    made: list[object] = []
    monkeypatch.setattr(text, "text_of", lambda value, form="auto": made.append(value) or text_of(value, form))
    assert len(repr(table).splitlines()) == 28
    assert table._repr_html_().count("<tr>") == 27
    assert "99,975 rows left out" in repr(table)
    assert len(made) < 300


def test_a_narrow_terminal_names_the_columns_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Table(pa.table({f"column_{i}": [i] for i in range(8)}), note="a note")
    assert len(repr(wide).splitlines()) == 4
    monkeypatch.setattr(text, "terminal_width", lambda: 60)
    *lines, left_out, note = repr(wide).splitlines()
    assert max(map(len, lines)) <= 60
    assert left_out == "… too narrow for column_6, column_7 …"
    assert note == "a note"
    monkeypatch.setattr(text, "terminal_width", lambda: 10)
    assert "too narrow for column_4," in repr(wide)
    message = Table(pa.table({"file": ["f"], "problem": [100 * "m"]}))
    assert 100 * "m" in repr(message)


def narrow(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, list[object]], width: int, **layout: tuple[str, ...]
) -> str:
    monkeypatch.setattr(text, "terminal_width", lambda: width)
    return repr(Table(pa.table(data), layout=text.Layout(**layout)))


def test_a_lone_value_stands_above_the_table_and_several_in_their_column(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = narrow(monkeypatch, {"run": ["a", "a"], "step": [1, 2]}, 80, in_title=("run",))
    assert alone.splitlines() == ["run a", "step", "----", "   1", "   2"]
    several = narrow(monkeypatch, {"run": ["a", "b"], "step": [1, 2]}, 80, in_title=("run",))
    assert several.splitlines()[0] == "run  step"


def test_in_a_narrow_terminal_columns_give_way_by_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    data: dict[str, list[object]] = {name: [12_345_678] for name in ("step", "created", "loss", "bytes", "health")}
    *lines, left_out = narrow(monkeypatch, data, 38, gives_way=("created", "bytes")).splitlines()
    assert lines[0].split() == ["step", "loss", "bytes", "health"]
    assert left_out == "… too narrow for created …"
    assert max(map(len, lines)) <= 38


def test_in_a_narrow_terminal_the_middle_of_names_gives_way_before_figures_do(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "transformer.blocks.11.attention.projection.weight"
    data = {"step": [1], "kind": ["exp_avg_sq"], "name": [name], "value": [1.5], "usual": [0.25]}
    head, _, row, hint = narrow(monkeypatch, data, 60).splitlines()
    assert head.split() == ["step", "kind", "name", "value", "usual"]
    assert row.split()[2].startswith("transformer.")
    assert row.split()[2].endswith(".weight")
    assert max(len(head), len(row)) <= 60
    assert "replaces the middle" in hint


def test_an_empty_table_says_so() -> None:
    assert repr(numbers(0)) == "(no rows)"
    assert "(no rows)" in numbers(0)._repr_html_()
    assert repr(Table(pa.table({"file": []}), note="no problems")) == "no problems"


def test_names_are_escaped_in_html_and_text() -> None:
    table = Table(pa.table({HOSTILE: [HOSTILE]}), note=HOSTILE)
    for shown in (table._repr_html_(), Report(HOSTILE, {HOSTILE: HOSTILE}, {HOSTILE: table})._repr_html_()):
        assert "<script" not in shown
        assert "&lt;script&gt;" in shown
    for shown in (repr(table), repr(Report(HOSTILE, {HOSTILE: HOSTILE}, {HOSTILE: table}))):
        assert "\x1b" not in shown
    assert len(repr(table).splitlines()) == 4


def test_html_follows_the_theme_and_stands_without_styles() -> None:
    shown = numbers(2)._repr_html_()
    assert "prefers-color-scheme: dark" in shown
    assert "var(--jp-content-font-color1, var(--vscode-editor-foreground, " in shown
    bare = re.sub(r"<style>.*?</style>| style=\"[^\"]*\"| class=\"[^\"]*\"", "", shown, flags=re.DOTALL)
    assert '<td align="right">1.0 KiB</td>' in bare
    bare = bare.replace(' align="right"', "")
    assert bare == (
        "<div><table><thead><tr><th>step</th><th>bytes</th></tr></thead>"
        "<tbody><tr><td>0</td><td>0 B</td></tr><tr><td>1</td><td>1.0 KiB</td></tr></tbody></table></div>"
    )
    assert '<td align="right" style="text-align:right">1.0 KiB</td>' in shown


def test_json_is_strict_and_csv_is_whole() -> None:
    table = Table(pa.table({"x": [math.nan, -math.inf, 0.1], "b": [b"\x01", None, b""], "n": ['a,"b"', "c", None]}))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = json.loads(table.to_json(), parse_constant=refuse)
    assert rows[0] == {"x": "NaN", "b": "01", "n": 'a,"b"'}
    assert [row["x"] for row in rows] == ["NaN", "-Infinity", 0.1]
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [
        ["x", "b", "n"],
        ["nan", "01", 'a,"b"'],
        ["-inf", "", "c"],
        ["0.1", "", ""],
    ]


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (None, "auto", ""),
        (True, "auto", "yes"),
        (1200, "auto", "1200"),
        (0.00012345, "number", "0.0001234"),
        (math.nan, "bytes", "nan"),
        (1536, "bytes", "1.5 KiB"),
        (5 * 1024**6, "bytes", "5120.0 PiB"),
        (0.0421, "seconds", "42.1 ms"),
        (0, "seconds", "0 s"),
        (75.0, "seconds", "75 s"),
        (1200, "seconds", "20.0 min"),
        (0.5, "share", "50.0%"),
        (0, "share", "0.0%"),
        (0.99999, "share", ">99.9%"),
        ((2, 3), "shape", "2x3"),
        ((), "shape", "scalar"),
        ([], "auto", ""),
        (["best", "x"], "auto", "best, x"),
        (b"\xff", "auto", "ff"),
        (datetime(2026, 11, 21, 10, 15, 2, tzinfo=UTC), "auto", "2026-11-21 10:15:02+00:00"),
        ("a\nb\x00\u202e", "auto", "a\\nb\\x00\\u202e"),
    ],
)
def test_values_for_people(value: object, form: str, expected: str) -> None:
    assert text_of(value, form) == expected  # type: ignore[arg-type]


def test_a_report_shows_its_facts_and_tables() -> None:
    report = Report("doctor", {"file system": "ext4", "free": 2048}, {"rates": numbers(1)}, {"free": "bytes"})
    assert repr(report).splitlines()[:3] == ["doctor", "file system  ext4", "free         2.0 KiB"]
    assert report["file system"] == "ext4"
    assert json.loads(report.to_json()) == {"file system": "ext4", "free": 2048, "rates": [{"step": 0, "bytes": 0}]}
    assert "rates" in report._repr_html_()


def test_rows_are_sorted_by_a_column_with_unknown_values_last() -> None:
    names, values = ["h.10", "h.2", "h.2", "a"], [1.0, None, 3.0, float("nan")]
    table = Table(pa.table({"name": names, "value": values}))
    assert table.sort("name")["name"].to_pylist() == ["a", "h.2", "h.2", "h.10"]
    assert table.sort("name")["value"].to_pylist()[1:3] == [None, 3.0], "equal values keep their order"
    assert table.sort("name", descending=True)["name"].to_pylist() == ["h.10", "h.2", "h.2", "a"]
    assert table.sort("value")["name"].to_pylist() == ["h.2", "h.10", "h.2", "a"]
    assert table.sort("value", descending=False)["name"].to_pylist() == ["h.10", "h.2", "h.2", "a"]
    with pytest.raises(NotFoundError, match="no column 'nmae'"):
        table.sort("nmae")
