"""docs/guarantees.md states exactly what the tests guard, and no promise is without a test."""

import re

import pytest
from guarantees import PAGE, PROMISES, guarantees_page, guarding_tests, recorded_figures
from places import ROOT


def test_the_page_equals_what_the_tests_say():
    assert PAGE.read_text() == guarantees_page(recorded_figures()), (
        "docs/guarantees.md is stale: run `python tests/project/guarantees.py`"
    )


@pytest.mark.parametrize("title", PROMISES)
def test_every_promise_has_a_test_that_guards_it(title):
    assert [test for promise, test in guarding_tests() if promise == title]


def test_every_mark_names_a_promise_that_exists():
    assert {promise for promise, _ in guarding_tests()} <= set(PROMISES)


def test_figures_belong_to_tests_that_exist():
    assert set(recorded_figures()) <= {test for _, test in guarding_tests()}


def test_every_guarantee_of_the_readme_is_on_the_page():
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## What is guaranteed") : readme.index("## What it costs")]
    titles = re.findall(r"^- \*\*(.+?)\.?\*\*", section, re.M)
    assert len(titles) > 5
    assert set(titles) <= set(PROMISES)
