"""A verb is registered in one place, and everything else that knows the verbs derives from the registry."""

import builtins
import importlib.util
import subprocess
import sys
from collections.abc import Iterator

import pytest
from explorer_helpers import tiny_history
from IPython.core.interactiveshell import InteractiveShell

import dshistory
from dshistory import current, registry
from dshistory.commands.cli import main
from dshistory.commands.completion import line_completions
from dshistory.commands.verbs import all_verbs
from dshistory.display.table import Table
from dshistory.explorer import Explorer
from dshistory.registry import verb


@pytest.fixture
def oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """This verb of a subclass is registered as any other is."""
    monkeypatch.setattr(registry, "_verbs", dict(registry._verbs))

    class Curious(Explorer):
        @verb("oldest", "oldest --run r")
        def oldest(self, *, run: str | None = None) -> Table:
            """Show the oldest checkpoint: one row.

            Args:
                run: only this run
            """
            return self.log(run=run).top(1)


@pytest.fixture
def history(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(current, "_opened", [])
    for run in tiny_history(tmp_path / "history"):
        monkeypatch.setenv("DSHISTORY", str(run.root))
        yield


def test_a_verb_registered_once_is_everywhere(oldest, history, capsys: pytest.CaptureFixture[str]) -> None:
    assert dshistory.oldest()[0]["step"] == dshistory.log()[0]["step"]
    assert dshistory.oldest.__doc__.startswith("Show the oldest")
    assert "oldest" in dshistory.__all__
    assert "oldest" in dir(dshistory)
    names: dict[str, object] = {}
    exec("from dshistory import *", names)
    assert "oldest" in names

    assert main(["oldest", "--csv"]) == 0
    assert capsys.readouterr().out.startswith("step,")
    assert main(["--help"]) == 0
    assert "oldest      Show the oldest checkpoint" in capsys.readouterr().out

    assert line_completions("old").texts == ["oldest"]
    assert "--run" in line_completions("oldest --").texts

    shell = InteractiveShell()
    dshistory.load_ipython_extension(shell)
    try:
        assert len(shell.run_line_magic("dshistory", "oldest")) == 1
    finally:
        dshistory.unload_ipython_extension(shell)
        InteractiveShell.clear_instance()


def test_without_its_registration_a_verb_is_nowhere() -> None:
    assert not hasattr(dshistory, "oldest")
    assert "oldest" not in dshistory.__all__


def test_two_verbs_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_verbs", dict(registry._verbs))

    def log(explorer: Explorer) -> None:
        """Do something else."""

    with pytest.raises(ValueError, match=r"'log' is registered by dshistory\.explorer\.reports\.Reports\.log"):
        verb()(log)
    verb()(Explorer.log)


def test_no_function_hides_behind_a_module_or_in_a_star_import_a_builtin() -> None:
    functions = {verb.attribute for verb in all_verbs()}
    assert not [name for name in functions if importlib.util.find_spec(f"dshistory.{name}")]
    assert not [name for name in dshistory.__all__ if hasattr(builtins, name)]


def test_the_functions_load_nothing_heavy_and_submodules_load_no_verbs() -> None:
    code = (
        "import sys; from dshistory import registry; assert 'dshistory.explorer' not in sys.modules;"
        "import dshistory; dshistory.diff, dshistory.__all__, dir(dshistory);"
        "heavy = {'torch', 'duckdb', 'plotly', 'IPython', 'ipywidgets', 'pandas', 'tqdm', 'capture'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
