"""Imports run downwards only, and each heavy package is imported where it belongs alone."""

import pytest
from project_helpers import LAYERS, all_modules, imports, modules, relative

ONE_PLACE = {
    "deepspeed": {
        "capture/loops/deepspeed/loop.py",
        "capture/deepspeed_checkpoints/engine.py",
        "capture/deepspeed_checkpoints/classes.py",
    },
    "duckdb": {"catalog/index/database.py"},
    "plotly": {"dshistory/display/plot.py"},
    "transformers": {"capture/huggingface.py"},
    "ipywidgets": {"dshistory/widgets/__init__.py", "dshistory/widgets/controls.py"},
    "anywidget": {"dshistory/widgets/__init__.py", "dshistory/widgets/resize.py"},
}


@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_imports_only_itself_and_the_layers_below(package):
    above = LAYERS[: LAYERS.index(package)]
    upwards = [
        f"{relative(path)}:{line} imports {name}"
        for path in modules(package)
        for name, line in imports(path)
        if name.partition(".")[0] in above
    ]
    assert not upwards


def test_imports_are_absolute():
    assert not [f"{relative(p)}:{line}" for p in all_modules() for name, line in imports(p) if name.startswith(".")]


@pytest.mark.parametrize("library", ONE_PLACE)
def test_a_heavy_library_is_imported_only_where_it_belongs(library):
    users = {relative(path) for path in all_modules() for name, _ in imports(path) if name.partition(".")[0] == library}
    assert users == ONE_PLACE[library]


@pytest.mark.parametrize("package", ["catalog", "native"])
def test_the_lower_layers_know_no_torch(package):
    users = {relative(p) for p in modules(package) for name, _ in imports(p) if name.partition(".")[0] == "torch"}
    assert not users


def test_the_rule_sees_imports_inside_functions_but_not_those_for_type_checkers(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import capture\nelse:\n    import catalog.index.database\n"
        "def later():\n    from dshistory import table\n"
    )
    assert [name for name, _ in imports(source)] == ["typing", "catalog.index.database", "dshistory"]
