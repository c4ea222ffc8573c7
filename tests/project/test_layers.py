"""Imports run downwards only, between packages and between rooms, and heavy packages each have one place."""

from collections.abc import Iterator

import pytest
from architecture import LAYERS, PAGE, ROOMS, may_import, modules_of, page_with_tree, room_of
from places import ROOT
from project_helpers import all_modules, imports, modules, relative

ONE_PLACE = {
    "deepspeed": {
        "capture/loops/deepspeed/loop.py",
        "capture/loops/deepspeed/cpu_adam.py",
        "capture/deepspeed_checkpoints/engine.py",
        "capture/deepspeed_checkpoints/classes.py",
    },
    "duckdb": {"catalog/index/database.py"},
    "plotly": {"dshistory/display/plot.py"},
    "transformers": {"capture/huggingface.py", "dshistory/conversion/importing/huggingface_names.py"},
    "ipywidgets": {"dshistory/widgets/__init__.py", "dshistory/widgets/controls.py"},
    "anywidget": {"dshistory/widgets/__init__.py", "dshistory/widgets/page_parts.py"},
}
MODULES = {name: path for package in LAYERS for name, path in modules_of(package).items()}
DOORS = {*LAYERS, "dshistory.__main__"}
"""These modules offer names of the rooms, so they stand above all of them."""


SMALL = {
    "dshistory.__main__": "Python asks for this file",
    "dshistory.conversion.exporting.torchfile": "one file for each format",
    "catalog.encoding.zstd": "the only file that imports zstandard",
    "capture.state.providers.counters": "one file for each provider",
    "capture.snapshot.forks": "a hook of the whole process, beside the snapshots that ask it",
}
"""Files of fewer than 40 lines with one user, and the reason why each stands alone."""


def imported_modules(name: str) -> Iterator[str]:
    """Yield the modules of ours that the module imports anywhere, each by the longest name that is a module."""
    for target, _ in imports(MODULES[name], names=True):
        parts = target.split(".")
        found = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES), None)
        if found is not None and found != name:
            yield found


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


@pytest.mark.parametrize("package", LAYERS)
def test_a_room_imports_only_itself_and_the_rooms_below(package):
    wrong = []
    for name in modules_of(package):
        for other in imported_modules(name):
            if name in DOORS or other in DOORS or other.partition(".")[0] != package or room_of(name) == room_of(other):
                continue
            if not may_import(room_of(name), room_of(other), package=package):
                wrong.append(f"{name} imports {other}")
    assert not wrong


@pytest.mark.parametrize("package", LAYERS)
def test_every_room_has_its_place_and_every_place_its_room(package):
    there = {room_of(name) for name in modules_of(package)} - {"__init__", "__main__"}
    assert there == {room for line in ROOMS[package] for room in line.split()}


def test_no_files_import_each_other_in_a_circle():
    graph = {name: set(imported_modules(name)) - DOORS for name in MODULES if name not in DOORS}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_small_file_with_one_user_has_a_reason():
    users: dict[str, set[str]] = {name: set() for name in MODULES}
    for name in MODULES:
        for other in imported_modules(name):
            users[other].add(name)
    small = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < 40 and len(users[name]) <= 1
    }
    assert small == SMALL.keys()


def test_a_folder_says_what_is_in_it():
    silent = [
        relative(folder)
        for package in LAYERS[:3]
        for folder in sorted({path.parent for path in modules(package)})
        if not (folder / "__init__.py").read_text().startswith('"""')
    ]
    assert not silent


def test_contributing_shows_the_rooms_as_they_are():
    page = PAGE.read_text()
    assert page == page_with_tree(page), "stale: run `make rooms`"


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
        "if TYPE_CHECKING:\n    import capture\nelse:\n    import catalog.index\n"
        "def later():\n    from dshistory.display import table\n"
    )
    assert [name for name, _ in imports(source)] == ["typing", "catalog.index", "dshistory.display"]
    assert [name for name, _ in imports(source, names=True)][-1] == "dshistory.display.table"


def test_every_top_of_the_tree_is_a_package():
    assert all((ROOT / package / "__init__.py").is_file() for package in LAYERS)
