"""Importing a package is cheap: heavy libraries load only when they are used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_helpers import tiny_history
from project_helpers import all_modules, relative, run_python

pytestmark = pytest.mark.slow

HEAVY = (
    "torch",
    "duckdb",
    "deepspeed",
    "transformers",
    "accelerate",
    "pandas",
    "plotly",
    "ipywidgets",
    "IPython",
    "tqdm",
    "pyarrow",
)
RUNTIME = (
    "capture.enable",
    "capture.restore",
    "capture.session",
    "capture.redo_log",
    "capture.publishing",
    "capture.maintenance",
    "capture.snapshot",
    "capture.unwritten",
    "capture.data_file",
    "capture.changes",
    "capture.loops",
)
"""Only a training needs this part of `capture`; a reader of a history does not."""

DOORS = ("enable", "restore", "checkpoint_engine")
"""These functions of `capture` stand in modules of the same name."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for run in tiny_history(tmp_path_factory.mktemp("imports") / "history"):
        yield run.root


def loaded(statement: str, names: tuple[str, ...], cwd: Path) -> set[str]:
    """Return which of `names` a new process has imported after the statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps([n for n in {names!r} if n in sys.modules]))"
    return set(json.loads(run_python("-c", program, cwd=cwd).splitlines()[-1]))


@pytest.mark.parametrize("package", ["native", "catalog", "capture", "dshistory"])
def test_an_import_brings_nothing_heavy(package, tmp_path):
    assert not loaded(f"import {package}", HEAVY, tmp_path)


def test_the_doors_of_capture_bring_neither_duckdb_nor_deepspeed(tmp_path):
    statement = "import capture\n[getattr(capture, name) for name in capture.__all__]"
    assert not loaded(statement, ("duckdb", "deepspeed", "transformers", "pandas", "plotly", "IPython"), tmp_path)


def test_a_loaded_module_is_seen(tmp_path):
    assert loaded("import sqlite3", ("sqlite3", "torch"), tmp_path) == {"sqlite3"}


def test_reading_the_records_needs_no_torch(root, tmp_path):
    statement = f"import dshistory\nh = dshistory.open({str(root)!r})\nrepr([h.log(), h.show(), h.tags()])"
    assert not loaded(statement, ("torch", "capture", "deepspeed", "transformers", "plotly"), tmp_path)


def test_the_command_line_lists_checkpoints_without_torch(root, tmp_path):
    statement = f"from dshistory.commands.cli import main\nmain(['log', {str(root)!r}])"
    assert not loaded(statement, ("torch", "capture", "deepspeed", "transformers", "plotly"), tmp_path)


@pytest.mark.parametrize(
    "question",
    [
        "h.diff(0, 20, exact=True, quiet=True)",
        "h.tensor('head.weight', 20)",
        "h.export(20, 'weights.safetensors', quiet=True)",
    ],
)
def test_reading_tensors_loads_nothing_of_the_runtime(question, root, tmp_path):
    statement = f"import dshistory\nh = dshistory.open({str(root)!r})\n{question}"
    assert not loaded(statement, RUNTIME, tmp_path)


def test_only_one_module_reads_data_files_through_the_native_reader():
    users = {relative(path) for path in all_modules() if "native.read(" in path.read_text()}
    assert users == {"catalog/data_files/stored_bytes.py"}


def test_capture_is_available_from_the_facade(tmp_path):
    assert "True" in run_python(
        "-c", "from dshistory import capture as a; import capture as b; print(a is b)", cwd=tmp_path
    )


BEFORE = (
    "import capture",
    "import capture.enable, capture.restore, capture.checkpoint_engine",
    "from capture.restore import restore",
    "from capture import checkpoint_engine, enable, restore",
    "from capture import *",
    "import capture; capture.enable; import capture.enable, capture.restore",
    "import capture.session.session",
    "import capture.huggingface",
    "from dshistory import capture",
    "import importlib, capture.enable; importlib.reload(capture)",
)
EACH_IN_ITS_PROCESS = """
import json, os, torch
for before in {before!r}:
    if os.fork() == 0:
        exec(before, {{}})
        import capture
        found = [getattr(capture, name) for name in {doors!r}]
        print(json.dumps([before, [[type(one).__name__, one.__name__] for one in found]]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def doors(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Return the type and name of each door after each of the imports; torch, which takes seconds, is imported once."""
    program = EACH_IN_ITS_PROCESS.format(before=BEFORE, doors=DOORS)
    return dict(map(json.loads, run_python("-c", program, cwd=tmp_path_factory.mktemp("doors")).splitlines()))


@pytest.mark.parametrize("before", BEFORE)
def test_a_door_is_the_function_whatever_was_imported_before(before, doors):
    assert doors[before] == [["function", name] for name in DOORS]


def test_a_verb_is_the_function_whatever_was_imported_before(tmp_path):
    program = (
        "import dshistory.commands.doctor, dshistory.current, capture.restore, dshistory\n"
        "print(*(type(getattr(dshistory, name)).__name__ for name in ('doctor', 'restore', 'log', 'diff', 'open')))"
    )
    assert set(run_python("-c", program, cwd=tmp_path).split()) == {"function"}


@pytest.mark.parametrize(
    ("package", "rooms"), [("capture", "capture.session, capture.load"), ("dshistory", "dshistory.trends")]
)
def test_a_package_shows_its_public_names_only(package, rooms, tmp_path):
    program = f"import {rooms}\nprint(*(name for name in dir({package}) if not name.startswith('__')))"
    shown = set(run_python("-c", program, cwd=tmp_path).split())
    names = set(run_python("-c", f"import {package}; print(*{package}.__all__)", cwd=tmp_path).split())
    assert shown == names | ({"open"} if package == "dshistory" else set())


def test_a_name_that_a_package_does_not_have_is_an_attribute_error(tmp_path):
    for package in ("capture", "dshistory"):
        program = f"import {package}\ntry:\n    {package}.nothing\nexcept AttributeError as error:\n    print(error)"
        assert f"module '{package}' has no attribute 'nothing'" in run_python("-c", program, cwd=tmp_path)
