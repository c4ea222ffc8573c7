"""The package as a whole: its exports, the cost of importing it, and the history that its functions act on."""

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_helpers import Run, tiny_history

import capture
import dshistory
from catalog.errors import NotFoundError
from dshistory.commands.arguments import help_text, parse
from dshistory.commands.parameters import UsageError, parameters
from dshistory.commands.verbs import all_verbs
from dshistory.conversion.exporting import FORMATS
from dshistory.explorer import Explorer
from dshistory.options import EXPORT_FORMATS

pytestmark = pytest.mark.usefixtures("nothing_opened")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for run in tiny_history(tmp_path_factory.mktemp("facade") / "history"):
        yield run.root


def test_everything_in_all_exists_and_open_is_not_in_it() -> None:
    names: dict[str, object] = {}
    exec("from dshistory import *", names)
    assert set(dshistory.__all__) <= set(names)
    assert names.get("open", open) is open
    assert "open" not in dshistory.__all__
    assert sorted(dshistory.__all__) == list(dshistory.__all__)
    assert dshistory.capture is capture
    with pytest.raises(AttributeError, match="nonsense"):
        dshistory.nonsense  # noqa: B018


def test_the_tab_key_shows_verbs_and_classes_and_no_module_or_hook() -> None:
    shown = {name: getattr(dshistory, name) for name in dir(dshistory)}
    assert set(dshistory.__all__) == set(shown) - {"open"}
    assert {name for name in shown if name[0].islower()} == {verb.attribute for verb in all_verbs()}
    assert {name for name in shown if name[0].isupper()} == {"Explorer", "HistoryError", "Report", "Table"}
    assert not [name for name in dir(capture) if inspect.ismodule(getattr(capture, name))]
    assert {name for name in dir(capture) if not name.startswith("__")} == set(capture.__all__)
    assert {name for name in dir(capture.Session) if not name.startswith("_")} == {
        "close",
        "failures",
        "history",
        "is_open",
        "log",
        "modify",
        "resumed_from",
        "run",
        "snapshot",
        "stats",
        "step",
        "tag",
        "wait",
    }
    hidden = {"faults", "hooks", "native"}
    assert not hidden & {*inspect.signature(capture.enable).parameters}
    assert not hidden & {*inspect.signature(capture.checkpoint_engine).parameters}


def test_importing_is_cheap_and_nothing_heavy() -> None:
    code = (
        "import sys, dshistory; heavy = {'torch', 'duckdb', 'plotly', 'IPython', 'pandas', 'pyarrow', 'deepspeed'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_capture_is_exported_too() -> None:
    subprocess.run([sys.executable, "-c", "from dshistory import capture; capture.enable"], check=True, timeout=120)


def test_functions_have_the_methods_arguments_and_help() -> None:
    for name in ("diff", "log", "reindex", "restore", "show", "sql", "tags", "tensor", "verify"):
        function, method = getattr(dshistory, name), getattr(Explorer, name)
        assert function.__doc__ == method.__doc__
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert list(inspect.signature(function).parameters.values()) == parameters


def test_the_history_opened_last_counts(root: Path, tmp_path: Path) -> None:
    other = Run(tmp_path / "other")
    other.close()
    dshistory.open(root)
    assert len(dshistory.log()) == 3
    dshistory.open(other.root)
    assert len(dshistory.log()) == 0
    opened = []
    thread = threading.Thread(target=lambda: opened.append(dshistory.open(root)))
    thread.start()
    thread.join()
    assert len(opened[0].log()) == 3
    assert len(dshistory.log()) == 0


def test_otherwise_the_environment_counts_and_then_this_folder(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match=r"no history was opened.*history \(\./history\); open one"):
        dshistory.log()
    (tmp_path / "history").symlink_to(root)
    assert len(dshistory.log()) == 3
    monkeypatch.setenv("DSHISTORY", str(tmp_path / "nothing"))
    with pytest.raises(NotFoundError, match=r"\(\$DSHISTORY\)"):
        dshistory.log()
    monkeypatch.setenv("DSHISTORY", str(root))
    assert dshistory.sql("SELECT count(*) AS n FROM checkpoints")[0] == {"n": 3}
    assert dshistory.show(10)["step"] == 10


def test_columns_of_one_name_get_distinct_names(root: Path) -> None:
    rows = Explorer.open(root).sql("SELECT 1 AS a, 2 AS a, 3 AS a_1, 4 AS a, 5 AS b")
    assert rows.columns == ("a", "a_2", "a_1", "a_3", "b")
    assert rows[0] == {"a": 1, "a_2": 2, "a_1": 3, "a_3": 4, "b": 5}
    assert rows.to_csv() == "a,a_2,a_1,a_3,b\n1,2,3,4,5\n"


def test_every_verb_has_help_examples_and_a_word_on_each_argument() -> None:
    for verb in all_verbs():
        assert verb.summary.endswith("."), verb.name
        assert bool(verb.examples) == bool(verb.surfaces), verb.name
        for parameter in parameters(verb):
            assert parameter.help, (verb.name, parameter.name)
            shown = help_text(verb, prog=f"dshistory {verb.name}", forms=True)
            assert parameter.option in shown or parameter.name.upper() in shown


def test_every_example_is_understood() -> None:
    import shlex

    for verb in all_verbs():
        for example in verb.examples:
            name, *words = shlex.split(example)
            assert name == verb.name
            call = parse(verb, words, prog=name, forms=True)
            inspect.signature(verb.function).bind(
                *([None] if verb.needs_history else []), *call.positional, **call.options
            )


def test_verbs_cannot_drift_from_the_functions() -> None:
    python_only = {"engine", "model", "optimizer", "scheduler", "scaler", "dataloader", "providers", "train_step"}
    for verb in (verb for verb in all_verbs() if verb.surfaces):
        named = list(inspect.signature(verb.function).parameters)[1 if verb.needs_history else 0 :]
        functions = {"predicate"} if verb.name == "bisect_replay" else set()  # `bisect` takes one as text too
        expected = [name for name in named if name not in python_only | functions]
        assert [p.name for p in parameters(verb)] == expected, verb.name
    methods = {name for name, _ in inspect.getmembers(Explorer, inspect.isfunction) if name[0] != "_"}
    assert {verb.name for verb in all_verbs()} - {"open", "doctor", "import", "convert"} == methods


def test_every_verb_is_a_function_of_the_module_too() -> None:
    for verb in all_verbs():
        function = getattr(dshistory, {"import": "import_checkpoint"}.get(verb.name, verb.name))
        named = list(inspect.signature(verb.function).parameters.values())[1 if verb.needs_history else 0 :]
        assert list(inspect.signature(function).parameters.values()) == named, verb.name


def test_an_option_that_is_on_is_switched_off_by_name() -> None:
    verbs = {verb.name: verb for verb in all_verbs()}
    assert dict(parse(verbs["restore"], ["3", "--no-verify"], prog="restore", forms=False).options) == {"verify": False}
    assert dict(parse(verbs["restore"], ["3"], prog="restore", forms=False).options) == {}
    assert "--no-verify" in help_text(verbs["restore"], prog="restore", forms=False)
    with pytest.raises(UsageError, match="--verify"):
        parse(verbs["restore"], ["3", "--verify"], prog="restore", forms=False)
    for verb in all_verbs():
        flags = [parameter for parameter in parameters(verb) if parameter.flag and not parameter.asks_first]
        assert all(flag.option.startswith("--no-") == flag.default for flag in flags), verb.name


def test_choices_are_checked_and_shown() -> None:
    verbs = {verb.name: verb for verb in all_verbs()}
    with pytest.raises(UsageError, match="--by is one of tensor, layer, kind, not 'name'"):
        parse(verbs["diff"], ["1", "2", "--by", "name"], prog="diff", forms=False)
    shown = help_text(verbs["trajectory"], prog="trajectory", forms=False)
    assert "changed_share" in shown
    assert "default: relative_update" in " ".join(shown.split())
    assert tuple(FORMATS) == EXPORT_FORMATS


def test_a_line_becomes_a_call() -> None:
    verbs = {verb.name: verb for verb in all_verbs()}
    call = parse(verbs["diff"], ["10", "--names", "a", "--names", "b", "run-b:20"], prog="diff", forms=True)
    assert (call.positional, dict(call.options)) == ((10, "run-b:20"), {"names": ["a", "b"]})
    call = parse(verbs["sql"], ["SELECT 1", "--params", "a=1", "--params", "b=x=y"], prog="sql", forms=True)
    assert dict(call.options) == {"a": 1, "b": "x=y"}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse(verbs["sql"], ["SELECT 1", "--params", "a"], prog="sql", forms=True)
