"""docs/coverage.md states exactly what the tests show."""

from coverage_table import PAGE, coverage_page


def test_the_page_equals_what_the_tests_say():
    assert PAGE.read_text() == coverage_page(), "docs/coverage.md is stale: run `make coverage-table`"


def test_the_page_has_both_tables():
    page = coverage_page()
    assert page.count("| `deepspeed_cases_") > 30
    assert "ZenFlow" in page
