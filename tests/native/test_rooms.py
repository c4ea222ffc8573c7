"""The includes of the C++ core run downwards from room to room, and never in a circle."""

import re
from pathlib import Path

import pytest

import native

NATIVE = Path(native.__file__).resolve().parent
SOURCES = NATIVE / "src"

BASE = {"base", "base/checksums", "base/files", "base/memory"}
BELOW = {
    "bindings": {"writer", "writer/backends", "reader", "statistics", "planes", "blocks", *BASE},
    "writer": {"writer/backends", "writer/queue", "writer/file", "blocks", *BASE},
    "writer/backends": {"writer/queue", "blocks", *BASE},
    "writer/queue": {"writer/file", "blocks", *BASE},
    "writer/file": {"blocks", *BASE},
    "reader": {"blocks", *BASE},
    "statistics": {"blocks", *BASE},
    "planes": {"planes/kernels", *BASE},
    "planes/kernels": set(),
    "blocks": BASE,
    "base": {"base/checksums", "base/files", "base/memory"},
    "base/memory": {"base/checksums", "base/files"},
    "base/checksums": set(),
    "base/files": set(),
}
"""This names the rooms that each room may include, besides itself. A room is a folder."""

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def included(folder: Path = SOURCES) -> dict[str, list[str]]:
    """Return the includes in quotes of every source file, by its path below `folder`."""
    files = [path for pattern in ("*.hpp", "*.cpp") for path in folder.rglob(pattern)]
    return {path.relative_to(folder).as_posix(): INCLUDE.findall(path.read_text(encoding="utf-8")) for path in files}


def upwards(includes: dict[str, list[str]]) -> list[str]:
    """Return every include that leaves its room for one that is not below it."""
    return [
        f"{file} includes {name}"
        for file, names in includes.items()
        for name in names
        if room(name) != room(file) and room(name) not in BELOW[room(file)]
    ]


def room(name: str) -> str:
    return name.rpartition("/")[0]


def circle(includes: dict[str, list[str]]) -> list[str]:
    """Return the files of one include circle, empty when there is none."""
    done: set[str] = set()

    def visit(file: str, path: list[str]) -> list[str]:
        if file in path:
            return [*path[path.index(file) :], file]
        if file in done:
            return []
        found = next(filter(None, (visit(name, [*path, file]) for name in includes.get(file, []))), [])
        done.add(file)
        return found

    return next(filter(None, (visit(file, []) for file in includes)), [])


def test_every_source_is_in_a_room() -> None:
    assert {room(file) for file in included()} == set(BELOW)


def test_includes_are_written_from_the_source_folder() -> None:
    files = included()
    assert not [f"{file} includes {name}" for file, names in files.items() for name in names if name not in files]


def test_includes_run_downwards() -> None:
    assert not upwards(included())


def test_there_is_no_include_circle() -> None:
    assert not circle(included())


def test_the_cpp_tests_are_in_the_same_rooms() -> None:
    rooms = {path.parent.name for path in (NATIVE / "tests").rglob("*_tests.cpp")} - {"tests"}
    assert rooms
    assert rooms <= set(BELOW)


def test_cmake_builds_every_source() -> None:
    listed = re.findall(r"\bsrc/(\S+\.cpp)\b", (NATIVE / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert set(listed) == {file for file in included() if file.endswith(".cpp")}


@pytest.mark.parametrize(
    ("above", "below"),
    [("writer", "reader"), ("base", "blocks"), ("statistics", "bindings"), ("writer/file", "writer/queue")],
)
def test_a_wrong_include_is_found(above: str, below: str) -> None:
    assert upwards({f"{above}/a.cpp": [f"{below}/b.hpp"]}) == [f"{above}/a.cpp includes {below}/b.hpp"]


def test_a_circle_is_found() -> None:
    assert circle({"a.hpp": ["b.hpp"], "b.hpp": ["c.hpp"], "c.hpp": ["b.hpp"]}) == ["b.hpp", "c.hpp", "b.hpp"]
