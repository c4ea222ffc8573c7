"""Links, pictures and targets that the project names exist, and no file names the machine it was made on."""

import re

import nbformat
import pytest
from places import ROOT
from project_helpers import relative, tracked_files

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
MACHINE_PATH = re.compile(r"/(?:home|Users)/\w+/|(?<![\w.])/(?:root|work)/")
TEXT = {".md", ".py", ".pyi", ".toml", ".txt", ".json", ".ipynb", ".cpp", ".hpp", ".yml", ".yaml", ""}
LARGEST_PICTURE_BYTES = 300_000

FILES = tracked_files()


@pytest.mark.parametrize("page", [p for p in FILES if p.suffix == ".md"], ids=relative)
def test_links_lead_somewhere(page):
    assert not [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]


def test_no_file_names_a_machine():
    named = [relative(p) for p in FILES if p.suffix in TEXT and MACHINE_PATH.search(p.read_text(errors="replace"))]
    assert not named


def test_pictures_are_small():
    assert not [relative(p) for p in FILES if p.suffix == ".png" and p.stat().st_size > LARGEST_PICTURE_BYTES]


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".ipynb"], ids=relative)
def test_notebooks_are_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_constraints_pin_every_tool_and_name_no_place():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.]*", line) for line in lines)
    assert "torch==2.13.0" in lines


def test_the_makefile_has_the_targets_that_the_readme_and_ci_name():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = {match for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run")
             for match in re.findall(r"^make ([a-z-]+)", p.read_text(), re.MULTILINE)}  # fmt: skip
    assert asked <= targets
    assert {"demo", "test"} <= asked
