"""The magics work when a user types them into a cell."""

import pytest
from browser_page import opened, write_notebook
from playwright.sync_api import expect


@pytest.fixture(scope="module")
def notebook(lab, browser):
    cells = ("%load_ext dshistory\n%dshistory open", "%dshistory diff --help", "")
    with opened(browser, lab, write_notebook(lab, "magics.ipynb", *cells)) as notebook:
        notebook.run_all()
        yield notebook


def test_help_is_shown_as_text(notebook):
    shown = notebook.page.locator(".jp-Cell").nth(1).locator(".jp-OutputArea-output").inner_text()
    assert "%dshistory diff" in shown
    assert "\\n" not in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("%dshistory tra", ["trajectory"]),
        ("%dshistory diff 4", ["4", "40", "44", "48"]),
        ("%dshistory tensor blocks.0.attention.qkv.", ["blocks.0.attention.qkv.bias", "blocks.0.attention.qkv.weight"]),
        ("%dshistory diff 4 8 --ki", ["--kinds"]),
    ],
)
def test_completion_offers_what_the_history_has(notebook, typed, offered):
    notebook.page.locator(".jp-Cell .cm-content").last.click()
    notebook.page.keyboard.press("Control+a")
    notebook.page.keyboard.type(typed)
    notebook.page.keyboard.press("Tab")
    expect(notebook.page.locator(".jp-Completer-match:visible")).to_have_text(offered)
    notebook.page.keyboard.press("Escape")
