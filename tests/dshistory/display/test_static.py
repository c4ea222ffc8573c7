"""The explorer's tables stay readable where no kernel runs: in a page made by nbconvert, and on GitHub."""

import re
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser

import nbformat
import pytest
from explorer_helpers import tiny_history
from nbconvert import HTMLExporter

from dshistory.explorer import Explorer

GITHUB_KEEPS = {"div": set(), "h4": set(), "p": set(), "table": set(), "thead": set(), "tbody": set(), "tr": set()} | {
    cell: {"align", "colspan"} for cell in ("td", "th")
}


class GitHub(HTMLParser):
    """This parser keeps the rows that remain without styles, classes and all but plain tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._inside = ""
        self.feed(re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in GITHUB_KEEPS
        assert {name for name, _ in attributes} - GITHUB_KEEPS[tag] <= {"style", "class"}
        if tag == "tr":
            self.rows.append([])
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("td", "th"):
            self.rows[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    for run in tiny_history(tmp_path_factory.mktemp("static") / "history"):
        yield Explorer.open(run.root)


def test_github_leaves_the_rows(explorer: Explorer) -> None:
    head, *rows = GitHub(explorer.diff(0, 20, quiet=True)._repr_html_()).rows
    assert head[:4] == ["name", "kind", "shape", "status"]
    assert rows[0][:4] == ["head.weight", "model", "8x4", "changed"]
    assert ["run", "run-a"] in GitHub(explorer.show(20)._repr_html_()).rows


def test_a_page_of_nbconvert_has_the_tables_and_asks_no_network(explorer: Explorer) -> None:
    shown = [explorer, explorer.log(), explorer.diff(0, 20, quiet=True), explorer.restore(20)]
    outputs = [
        nbformat.v4.new_output("display_data", {"text/html": item._repr_html_(), "text/plain": repr(item)})
        for item in shown
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("h", outputs=outputs)])
    page, _ = HTMLExporter(exclude_anchor_links=True).from_notebook_node(notebook)
    for item in shown:
        assert unescape(item._repr_html_()) in unescape(page)
    assert not re.findall(r'class="dsh".*?(?:src|href)="http', page)
