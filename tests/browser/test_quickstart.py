"""Every cell of the quickstart notebook runs in a real JupyterLab, and its output is readable."""

import pytest
from browser_contrast import DISCERNIBLE, READABLE, contrasts
from browser_page import opened

FIGURES = 3
TABLES = 6
DRAWN = """() => [...document.querySelectorAll('.js-plotly-plot')]
    .filter(plot => plot.querySelector('.main-svg')?.getBoundingClientRect().height > 100)
    .map(plot => plot.data.map(trace => (trace.z ?? [trace.y]).flat().length))"""


@pytest.fixture(scope="module")
def quickstart(lab, browser):
    """Run all cells of the notebook in a page; return the page and the code cells."""
    with opened(browser, lab, "quickstart.ipynb") as notebook:
        yield notebook, notebook.run_all()


def test_every_cell_runs(quickstart):
    _, cells = quickstart
    assert all(cell["count"] for cell in cells)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


def test_every_figure_is_drawn(quickstart):
    notebook, _ = quickstart
    notebook.page.wait_for_function(f"() => ({DRAWN})().length === {FIGURES}")
    assert all(traces and all(traces) for traces in notebook.page.evaluate(DRAWN))


def test_every_table_has_rows(quickstart):
    notebook, _ = quickstart
    *tables, verified = notebook.page.locator(".dsh").evaluate_all(
        "all => all.map(one => one.querySelectorAll('tr').length)"
    )
    assert len(tables) == TABLES
    assert all(rows > 1 for rows in tables)
    assert verified == 0


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_everything_can_be_read_in_both_themes(quickstart, theme):
    notebook, _ = quickstart
    notebook.use_theme(theme)
    in_tables = contrasts(notebook.page, ".dsh :is(th, td, p, h4)")
    in_figures = contrasts(notebook.page, ".js-plotly-plot text")
    assert len(in_tables) > 100
    assert len(in_figures) > 30
    assert [one for one in in_tables if one["contrast"] < READABLE] == []
    assert [one for one in in_figures if one["contrast"] < DISCERNIBLE] == []
    notebook.see(".js-plotly-plot")
    notebook.picture(f"quickstart-{theme.split()[-1].lower()}")
