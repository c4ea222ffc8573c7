"""docs/architecture.md names files and functions that exist, and enters no file twice on one way."""

import ast
import re

import pytest
from places import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
WAYS = re.findall(r"^## (The life of [^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
STOP = re.compile(r"^\d+\. `([^`]+\.(?:py|cpp|hpp))`: ((?:`[^`]+`(?:, | and )?)+)", re.MULTILINE)
PLACES = re.findall(r"`((?:dshistory|capture|catalog|native|tests|docs)/[\w/.]+)`", PAGE)


def stops(text):
    """The numbered stops of a way: file, and the names that the page says are entered there."""
    return [(file, re.findall(r"`([^`]+)`", names)) for file, names in STOP.findall(text)]


def defined(path):
    """The functions, classes and methods of a Python file as `name` and `Class.method`; of C++, every identifier."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+(?:::\w+)*", text))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("title", "text"), WAYS, ids=[title for title, _ in WAYS])
def test_a_way_leads_through_files_and_functions_that_exist(title, text):
    missing = [
        f"{file}: {name}"
        for file, names in stops(text)
        for name in names
        if not (ROOT / file).is_file() or name not in defined(ROOT / file)
    ]
    assert len(stops(text)) >= 5
    assert len(stops(text)) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)), "a stop that the test can't read"
    assert not missing


@pytest.mark.parametrize(("title", "text"), WAYS, ids=[title for title, _ in WAYS])
def test_a_way_enters_no_file_twice(title, text):
    files = [file for file, _ in stops(text)]
    assert len(set(files)) == len(files)


def test_the_page_has_the_four_ways_and_names_places_that_exist():
    ways = ["a step", "a question", "a restore", "a replay"]
    assert [title for title, _ in WAYS] == [f"The life of {one}" for one in ways]
    assert not [place for place in PLACES if not (ROOT / place).exists()]
