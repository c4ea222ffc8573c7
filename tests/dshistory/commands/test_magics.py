"""The magics run in a real IPython shell."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explorer_helpers import extended_shell, tiny_history
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError as ShellUsageError
from IPython.core.interactiveshell import InteractiveShell

import dshistory
from dshistory.display.table import Table
from dshistory.explorer import Explorer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for run in tiny_history(tmp_path_factory.mktemp("magics") / "history"):
        yield run.root


@pytest.fixture
def shell(nothing_opened: None, tmp_path: Path) -> Iterator[InteractiveShell]:
    with extended_shell(tmp_path / "ipython") as shell:
        yield shell


def run(shell: InteractiveShell, cell: str) -> Any:
    result = shell.run_cell(cell)
    result.raise_error()
    return result.result


def test_the_verbs_run_as_magics(shell: InteractiveShell, root: Path) -> None:
    assert isinstance(run(shell, f"%dshistory open {root}"), Explorer)
    assert run(shell, "%dshistory log")["step"].to_pylist() == [0, 10, 20]
    diff = run(shell, "%dshistory diff 0 20 --names 'layers.*' --quiet")
    assert set(diff["name"].to_pylist()) == {"layers.0.mlp.weight", "layers.0.mlp.bias", "layers.1.norm"}
    assert run(shell, "%dshistory show good")["step"] == 10
    assert run(shell, "%dshistory tensor layers.1.norm 20").tolist() == [1.0] * 8
    assert list(run(shell, "%dshistory verify --quiet")) == []
    assert run(shell, "rows = %dshistory tags\nlen(rows)") == 1


def test_loading_binds_the_name_and_unloading_takes_it_back(shell: InteractiveShell) -> None:
    assert run(shell, "dshistory") is dshistory
    shell.run_line_magic("unload_ext", "dshistory")
    assert "dshistory" not in shell.user_ns
    assert shell.find_line_magic("dshistory") is None
    assert shell.find_cell_magic("dshistory") is None
    assert "log" not in _completions(shell, "%dshistory l")


def test_unloading_leaves_a_users_own_variable(shell: InteractiveShell) -> None:
    shell.user_ns["dshistory"] = 7
    shell.run_line_magic("unload_ext", "dshistory")
    assert shell.user_ns["dshistory"] == 7


def test_sql_cells(shell: InteractiveShell, root: Path) -> None:
    run(shell, f"%dshistory open {root}")
    query = "SELECT step, value\nFROM metrics WHERE name = 'loss'\nORDER BY step DESC LIMIT 1"
    assert run(shell, f"%%dshistory sql\n{query}")[0]["step"] == 21
    for head in ("sql last <<", "sql last<<"):
        shell.user_ns.pop("last", None)
        assert run(shell, f"%%dshistory {head}\n{query}") is None
        assert isinstance(shell.user_ns["last"], Table)
    (row,) = run(
        shell, "%%dshistory sql --params step=10\nSELECT value FROM metrics WHERE step = $step AND name = 'loss'"
    )
    assert row["value"] == 2.0


def test_mistakes_give_one_line_and_fail_the_cell(
    shell: InteractiveShell, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, f"%dshistory open {root}")
    for cell, message in [
        ("%dshistory show 11", "the nearest are 10 and 20"),
        ("%dshistory lgo", "log"),
        ("%dshistory diff", "%dshistory diff needs A;"),
        ("%dshistory diff 'open", "quot"),
        ("%%dshistory log\nSELECT 1", "%%dshistory sql"),
        ("%%dshistory sql 1x <<\nSELECT 1", "1x"),
        ("%%dshistory sql <<\nSELECT 1", "not a name"),
        ("%dshistory sql 'SELEC 1'", "SELEC"),
        ("%dshistory sql", "needs QUERY"),
        ("%%dshistory sql\nSELECT *\nFROM metrcs", "no table 'metrcs'; the nearest is metrics"),
        ("%%dshistory sql\nSELECT $nothing", "no variable 'nothing'"),
        ("%%dshistory sql --with nothing\nSELECT 1", "no query was saved as 'nothing'"),
        ("%dshistory trajectory --metric nrm", "--metric is one of norm, "),
        ("%dshistory show run-a", "'run-a:latest'"),
        ("%dshistory log --json", "--json"),
    ]:
        capsys.readouterr()
        result = shell.run_cell(cell)
        shown = "".join(capsys.readouterr())
        assert not result.success, cell
        assert message in shown, (cell, shown)
        assert "Traceback" not in shown
        assert len(shown.strip().splitlines()) == 1, shown


def test_without_a_history_it_says_where_it_looked(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert not shell.run_cell("%dshistory log").success
    assert "no history was opened, and there is none at" in "".join(capsys.readouterr())


def test_a_semicolon_hides_what_a_line_shows(shell: InteractiveShell, root: Path) -> None:
    run(shell, f"%dshistory open {root}")
    assert run(shell, "%dshistory log;") is None
    assert run(shell, "%dshistory show 10;") is None
    assert len(run(shell, "%dshistory sql SELECT 1;")) == 1


def test_help(shell: InteractiveShell) -> None:
    assert repr(run(shell, "%dshistory help diff")) == repr(run(shell, "%dshistory diff --help"))
    assert repr(run(shell, "%dshistory help")) == repr(run(shell, "%dshistory"))
    assert "restore" in repr(run(shell, "%dshistory"))
    assert "%dshistory diff 1200 1250" in repr(run(shell, "%dshistory diff --help"))
    assert "--json" not in repr(run(shell, "%dshistory diff --help"))


def _completions(shell: InteractiveShell, line: str) -> list[str]:
    """Ask for completions as the kernel does."""
    with provisionalcompleter():
        return [completion.text for completion in shell.Completer.completions(line, len(line))]


def test_completion(shell: InteractiveShell, root: Path) -> None:
    assert _completions(shell, "%dshistory lo") == ["log"]
    assert "latest" not in _completions(shell, "%dshistory diff ")
    run(shell, f"%dshistory open {root}")
    assert _completions(shell, "%dshistory ver") == ["verify"]
    assert set(_completions(shell, "%dshistory show ")) == {"0", "10", "20", "good", "latest", "best"}
    assert _completions(shell, "%dshistory diff 0 2") == ["20"]
    assert "10" not in _completions(shell, "%dshistory diff 0 20 1")
    assert _completions(shell, "%dshistory tensor layers.0.mlp.w") == ["layers.0.mlp.weight"]
    assert _completions(shell, "%dshistory tensor head.weight 1") == ["10"]
    assert _completions(shell, "%dshistory tensor head.weight --state exp") == ["exp_avg"]
    assert _completions(shell, "%dshistory diff 0 --qu") == ["--quiet"]
    assert _completions(shell, "%dshistory diff --quiet 0 1") == ["10"]
    assert _completions(shell, "%dshistory log --run run") == ["run-a"]
    assert _completions(shell, "%%dshistory sq") == ["sql"]


def test_completion_inside_strings_of_python(shell: InteractiveShell, root: Path) -> None:
    assert _completions(shell, 'dshistory.tensor("lay') == []
    shell.user_ns["h"] = Explorer.open(root)
    names = ["layers.0.mlp.bias", "layers.0.mlp.weight", "layers.1.norm"]
    # The explorer before the verb counts, whichever history was opened last.
    assert _completions(shell, 'h.tensor("lay') == names
    run(shell, f"%dshistory open {root}")
    for code in ('dshistory.tensor("lay', "x = [dshistory.tensor('lay", 'len("(") # it\'s\nh.tensor(\n    "lay'):
        assert _completions(shell, code) == names, code
    assert _completions(shell, 'h.tensor("head.weight", "la') == ["latest"]
    assert _completions(shell, 'h.diff(0, "be') == ["best"]
    assert _completions(shell, 'h.diff(0, by="la') == ["layer"]
    assert _completions(shell, 'h.trajectory(["head.weight", "layers.1') == ["layers.1.norm"]
    assert _completions(shell, 'h.trajectory(kinds=("exp') == ["exp_avg"]
    assert _completions(shell, 'h.tensor("head.weight", state="exp') == ["exp_avg"]
    assert _completions(shell, 'h.sql("SELECT count(*) FROM checkp') == ["checkpoints"]
    assert _completions(shell, 'print("lay') == []
    assert _completions(shell, "h.tensor(" + 100_000 * "[" + '"lay') == names, "in time that grows with the text alone"
    assert _completions(shell, 'h.diff(0).top("lay') == []
    shell.user_ns["rows"] = shell.user_ns["h"].log()
    assert "step" in _completions(shell, 'rows["st')


def test_each_variable_in_a_line_counts_as_one_word(shell: InteractiveShell, root: Path) -> None:
    shell.user_ns.update(root=str(root), step=10, pattern="layers.* --kinds nonsense")
    run(shell, "%dshistory open {root}")
    assert run(shell, "%dshistory show $step")["step"] == 10
    assert run(shell, "%dshistory show {step}")["step"] == 10
    with pytest.raises(ShellUsageError, match=r"no tensor fits 'layers\.\* --kinds nonsense'"):
        run(shell, "%dshistory diff 0 --names {pattern}")
    with pytest.raises(ShellUsageError, match=r"'\{unknown\}'"):
        run(shell, "%dshistory show {unknown}")
    assert (
        run(shell, "def look(at):\n    return get_ipython().run_line_magic('dshistory', 'show {at}')\nlook(20)")["step"]
        == 20
    )


def test_values_of_variables_never_become_sql(shell: InteractiveShell, root: Path) -> None:
    run(shell, f"%dshistory open {root}")
    shell.user_ns.update(name="loss' OR 1 = 1 --", steps=[0, 10])
    assert len(run(shell, "%%dshistory sql\nSELECT * FROM metrics WHERE name = $name")) == 0
    assert len(run(shell, "%%dshistory sql\nSELECT * FROM metrics WHERE name = '{{name}}'")) == 0
    query = "SELECT * FROM metrics WHERE name = 'loss' AND step IN $steps"
    assert len(run(shell, f"%%dshistory sql\n{query}")) == 2
    assert len(run(shell, f'%dshistory sql "{query}"')) == 2
    assert len(run(shell, f"%dshistory sql {query}")) == 2


def test_sql_cells_have_jupysqls_options(shell: InteractiveShell, root: Path, tmp_path: Path) -> None:
    run(shell, f"%dshistory open {root}")
    assert len(run(shell, "%%dshistory sql both= <<\nSELECT 1")) == len(shell.user_ns["both"]) == 1
    assert run(shell, "%%dshistory sql --save late --no-execute\nSELECT * FROM metrics WHERE step > $low") is None
    shell.user_ns["low"] = 15
    counted = "%%dshistory sql --with late\nSELECT count(DISTINCT step) AS n FROM late"
    assert run(shell, counted)[0] == {"n": 2}
    shell.user_ns["low"] = 20
    assert run(shell, counted)[0] == {"n": 1}
    (tmp_path / "late.sql").write_text("SELECT count(*) AS n FROM late")
    assert run(shell, "%dshistory sql --file late.sql")[0]["n"] == 1
    assert run(shell, "%dshistory sql late_steps << SELECT DISTINCT step FROM late") is None
    assert shell.user_ns["late_steps"]["step"].to_pylist() == [21]
    assert "--no-execute" in repr(run(shell, "%dshistory sql --help"))
    assert len(run(shell, "%dshistory sql '" + "SELECT 1 AS a " + 300 * " " + "'")) == 1
