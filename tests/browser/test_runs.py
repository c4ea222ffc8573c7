"""Runs in the explorer in a browser: rows are chosen with mouse and keyboard, and the picture can be read."""

import pytest
from browser_contrast import READABLE, contrasts
from browser_explorer import ExplorerPage
from browser_page import opened, write_notebook
from widget_helpers import layered_history, second_run


@pytest.fixture(scope="module")
def explorer(lab, browser, tmp_path_factory):
    history = tmp_path_factory.mktemp("runs") / "history"
    second_run(layered_history(history))
    cells = (f"import dshistory\nh = dshistory.open({str(history)!r})", "h.explore()")
    with opened(browser, lab, write_notebook(lab, "runs.ipynb", *cells)) as notebook:
        notebook.run_all()
        yield ExplorerPage(notebook)


def row(explorer, text):
    return explorer.page.locator(".dsh-runs tbody tr", has_text=text)


def test_a_click_on_two_rows_compares_the_runs(explorer):
    explorer.notebook.see(".dsh-runs tbody tr")
    row(explorer, "run-a").first.click()
    explorer.wait_for_code("h.runs()")
    row(explorer, "lr_scale 0.5").focus()
    explorer.page.keyboard.press("Enter")
    explorer.wait_for_code("h.compare('run-a', 'again').plot()")
    explorer.page.locator(".dsh-comparison svg text", has_text="again").wait_for()
    assert explorer.page.locator(".dsh-runs tr[aria-selected=true]").count() == 2


def test_another_picture_of_them(explorer):
    explorer.page.locator(".dsh-picture select").select_option("layers")
    explorer.wait_for_code("h.compare('run-a', 'again').plot('layers')")
    explorer.page.locator(".dsh-comparison svg image").first.wait_for()


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_the_runs_can_be_read_in_both_themes(explorer, theme):
    explorer.notebook.use_theme(theme)
    explorer.page.locator(".dsh-picture select").select_option("distance")
    explorer.wait_for_code("h.compare('run-a', 'again').plot('distance')")
    explorer.page.locator(".dsh-comparison svg text", has_text="distance").wait_for()
    explorer.notebook.see(".dsh-comparison")
    texts = contrasts(explorer.page, ":is(.dsh-runs, .dsh-comparison) :is(h4, td, th, p, text)")
    assert len(texts) > 30
    assert [one for one in texts if one["contrast"] < READABLE] == []
    explorer.notebook.picture(f"runs-{theme.split()[-1].lower()}")
