"""A notebook in a real JupyterLab as a user sees it: cells, figures, tables, and the errors of the browser."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import nbformat
from browser_lab import Lab
from places import ROOT
from playwright.sync_api import Browser, Locator, Page

PICTURES = ROOT / "build" / "browser"
UNDER_THE_MOUSE = ".modebar, .hoverlayer { visibility: hidden }"
"""Parts of a figure that appear only under the mouse and do not belong in a picture."""
VIEWPORT: Any = {"width": 1280, "height": 1600}
OPEN_MS = 60_000
WAIT_MS = 60_000
"""How long a test waits for a change of the page, on a machine that also does other work."""
RUN_MS = 120_000

NOISE = re.compile(r"kernel: No such comm( target registered: jupyter\.widget\.control|: [0-9a-f-]{36})")
"""Errors to ignore: JupyterLab asks a new kernel for its widgets before the notebook has imported ipywidgets."""

# An exception from a widget's callback belongs to no cell, so the messages of the kernel are read as well.
_READY = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    await panel.context.ready;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    panel.sessionContext.iopubMessage.connect((_, {header, content}) => {
        const plain = lines => lines.join('\\n').replace(/\\u001b\\[[0-9;]*m/g, '');
        if (header.msg_type === 'error') console.error('kernel: ' + plain(content.traceback));
        if (header.msg_type === 'stream' && content.name === 'stderr')
            content.text.split('\\n').filter(line => line.trim()).forEach(line => console.error('kernel: ' + line));
    });
    window.jupyterapp.shell.collapseLeft();
}"""

# The result of the command can't be passed to the test, only the fact that it has ended.
_RUN_ALL = """() => {
    window.dshRan = false;
    window.jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { window.dshRan = true; });
}"""

_CELLS = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
    .filter(cell => cell.type === 'code')
    .map(cell => ({source: cell.sharedModel.source, count: cell.executionCount, outputs: cell.outputs.toJSON()}))"""


@contextlib.contextmanager
def opened(browser: Browser, lab: Lab, notebook: str) -> Iterator["NotebookPage"]:
    """Open a notebook in a fresh browser context; assert at the end that browser and kernel reported no errors."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with browser.new_context(viewport=VIEWPORT) as context:
        page = NotebookPage(context.new_page())
        page.open(lab, notebook)
        yield page
    assert not page.complaints, "\n".join(["complaints of the browser:", *page.complaints])


class NotebookPage:
    """One notebook in a page of a browser; `complaints` are the errors of page, console and kernel so far."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))

    def open(self, lab: Lab, notebook: str) -> None:
        """Open a notebook from the server's folder; return when its kernel has answered."""
        self.page.goto(lab.page(notebook))
        self.page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=OPEN_MS)
        self.page.evaluate(_READY)

    def run_all(self) -> list[dict[str, Any]]:
        """Run all cells; return the code cells with their `source`, execution `count` and `outputs`."""
        self.page.evaluate(_RUN_ALL)
        self.page.wait_for_function("() => window.dshRan", timeout=RUN_MS)
        return list(self.page.evaluate(_CELLS))

    def use_theme(self, name: str) -> None:
        """Switch the theme as a user would in the menu; return when the page has its colours."""
        self.page.evaluate(
            "name => { window.jupyterapp.commands.execute('apputils:change-theme', {theme: name}); }", name
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)

    def see(self, selector: str) -> Locator:
        """Return the first element of `selector`, scrolled into view once it exists."""
        element = self.page.locator(selector).first
        element.scroll_into_view_if_needed()
        return element

    def picture(self, name: str, selector: str | None = None) -> None:
        """Save a PNG of the page, or of the first element of `selector`."""
        shown = self.page if selector is None else self.page.locator(selector).first
        shown.screenshot(path=PICTURES / f"{name}.png", style=UNDER_THE_MOUSE)

    def _note(self, text: str) -> None:
        if not NOISE.fullmatch(text):
            self.complaints.append(text)


def write_notebook(lab: Lab, name: str, *cells: str) -> str:
    """Write a notebook with these code cells into the server's folder; return its name."""
    # Without the name of a kernel, JupyterLab would show a dialog that asks for one.
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel)
    nbformat.write(document, lab.root / name)
    return name
