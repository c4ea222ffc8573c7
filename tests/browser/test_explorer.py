"""The explorer in a browser: each gesture with mouse or keyboard changes the view and shows its line of Python."""

import math

import pytest
from browser_contrast import READABLE, contrasts
from browser_explorer import ExplorerPage
from browser_history import SPIKE, STEPS
from browser_page import opened, write_notebook

import dshistory


@pytest.fixture(scope="module")
def explorer(lab, browser):
    cells = ("import dshistory\nh = dshistory.open()", "h.explore()")
    with opened(browser, lab, write_notebook(lab, "explorer.ipynb", *cells)) as notebook:
        notebook.run_all()
        yield ExplorerPage(notebook)


@pytest.fixture(scope="module")
def h(trained):
    return dshistory.Explorer.open(trained)


def returned(h, code):
    """Return what the line of Python returns to a user who copies it."""
    return eval(code, {"h": h})


def test_the_figure_is_as_wide_as_its_place(explorer):
    explorer.page.locator(".dsh-figure").wait_for()
    width = "(plot => plot.clientWidth > 900 && plot._fullLayout.width === plot.clientWidth)"
    explorer.page.wait_for_function(f"() => {width}(document.querySelector('.dsh-figure'))")


def test_it_shows_the_whole_history(explorer, h):
    for part in ("metric", "checkpoints", "anomalies", "heat"):  # each is drawn by itself
        explorer.wait_until("trace.x?.length > 0", trace=part)
    assert len(explorer.values("metric", "x")) == STEPS
    assert explorer.values("checkpoints", "x") == h.log()["step"].to_pylist()
    assert SPIKE in explorer.values("anomalies", "x")
    steps, _, values = returned(h, explorer.code).grid()
    assert explorer.values("heat", "x") == steps
    assert explorer.values("heat", "customdata") == [
        [pytest.approx(value) if value is not None else None for value in line] for line in values
    ]


def test_the_slider_narrows_the_steps(explorer, h):
    explorer.drag_range("lower", 0.5)
    explorer.wait_until("trace.x[0] > 30")
    assert explorer.code == "h.layers(metric='relative_update', first=40)"
    assert explorer.values("heat", "x") == returned(h, explorer.code).grid()[0]
    explorer.drag_range("lower", 0.0)
    explorer.wait_until("trace.x[0] === 0")


def test_a_click_on_a_cell_looks_into_its_tensor(explorer, h):
    explorer.click_cell("blocks.1", SPIKE)
    explorer.wait_until("trace.x?.length > 0", trace="histogram")
    explorer.wait_for_code("h.trajectory('blocks.1.")
    # A bias that was born at zero has an infinite first update, which a figure can't show.
    shown = [None if value in (None, math.inf) else value for value in returned(h, explorer.code)["value"].to_pylist()]
    assert explorer.values("detail", "y") == pytest.approx(shown)
    explorer.notebook.picture("explorer", ".dsh-explorer")
    explorer.click_cell("tokens", 20)
    explorer.wait_for_code("h.trajectory('tokens")


def test_a_click_on_an_anomaly_opens_its_diff(explorer, h):
    explorer.click_mark("anomalies", SPIKE)
    before = max(step for step in h.log()["step"].to_pylist() if step < SPIKE)
    explorer.wait_for_code(f"h.diff({before}, {SPIKE})")
    rows = explorer.page.locator(".dsh-diff tbody tr")
    rows.first.wait_for()
    assert returned(h, explorer.code)[0]["name"] in rows.first.inner_text()
    explorer.page.locator(".dsh-diff thead th").first.click()
    explorer.wait_for_code(f"h.diff({before}, {SPIKE}).sort('name')")
    explorer.page.locator(".dsh-diff thead th", has_text="name ▲").wait_for()


def test_the_figure_with_all_of_its_panels_leaves_room_on_a_page_of_1000_pixels(explorer):
    assert explorer.page.locator(".dsh-figure").bounding_box()["height"] < 700
    titles = explorer.page.evaluate(
        "() => document.querySelector('.dsh-figure').layout.annotations.filter(a => a.visible).map(a => a.text)"
    )
    assert [title.split(" ")[0] for title in titles] == ["loss", "relative_update,", "relative_update", "magnitudes"]


def test_the_figure_is_as_wide_as_its_place_also_after_a_tensor_was_opened(explorer):
    whole = explorer.page.viewport_size
    for width in (800, whole["width"]):
        explorer.page.set_viewport_size({**whole, "width": width})
        fits = f"(plot => plot.clientWidth < {width} && plot._fullLayout.width === plot.clientWidth)"
        explorer.page.wait_for_function(f"() => {fits}(document.querySelector('.dsh-figure'))")


def test_the_filter_narrows_the_layers(explorer, h):
    field = explorer.page.locator(".dsh-filter input")
    field.fill("*.mlp.*")
    field.press("Enter")
    explorer.wait_until("trace.y.every(name => name.includes('blocks'))")
    assert explorer.code == "h.layers('*.mlp.*', metric='relative_update')"
    field.fill("nothing.like.it")
    field.press("Enter")
    explorer.page.wait_for_function("() => document.querySelector('.dsh-status').innerText.includes('nothing.like.it')")
    print(explorer.page.locator(".dsh-status").inner_text())
    field.fill("*")
    field.press("Enter")
    explorer.wait_until("trace.y.includes('tokens')")


def test_another_metric(explorer, h):
    explorer.page.locator(".dsh-metric select").select_option("norm")
    explorer.wait_for_code("h.layers(metric='norm'")
    explorer.wait_until("trace.z[0][0] > 0")
    explorer.page.locator(".dsh-metric select").select_option("relative_update")
    explorer.wait_for_code("h.layers(metric='relative_update'")


def test_the_button_compares_two_steps(explorer, h):
    explorer.page.locator(".dsh-step-a select").select_option("40")
    explorer.page.locator(".dsh-step-b select").select_option("64")
    explorer.page.locator(".dsh-diff-button").click()
    explorer.wait_for_code("h.diff(40, 64)")
    explorer.page.locator(".dsh-diff h4", has_text="h.diff(40, 64)").wait_for()
    rows = explorer.page.locator(".dsh-diff tbody tr")
    rows.first.wait_for()
    assert returned(h, explorer.code)[0]["name"] in rows.first.inner_text()


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_it_can_be_read_in_both_themes(explorer, theme):
    explorer.notebook.use_theme(theme)
    explorer.click_cell("blocks.1", SPIKE)
    explorer.wait_for_code("h.trajectory('blocks.1.")
    texts = contrasts(
        explorer.page, ".dsh-explorer :is(.widget-label, .widget-readout, button, th, td, .dsh-status span)"
    )
    in_figure = contrasts(explorer.page, ".dsh-figure .main-svg > g:not(.hoverlayer) text")
    assert len(texts) > 50
    assert len(in_figure) > 30
    assert [one for one in texts if one["contrast"] < READABLE] == []
    assert [one for one in in_figure if one["contrast"] < READABLE] == []
    explorer.notebook.picture(f"explorer-{theme.split()[-1].lower()}")
