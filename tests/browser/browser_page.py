"""A notebook in a real JupyterLab, as a person sees it: its cells, its figures, its tables, and what the browser complained of."""

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
"""What a figure shows only where the mouse is: no part of a picture."""
VIEWPORT: Any = {"width": 1280, "height": 1600}
OPEN_MS = 60_000
WAIT_MS = 20_000
"""How long a page may take for what a test waits for, on a machine that does other things too."""
RUN_MS = 120_000

NOISE = re.compile(r"kernel: No such comm( target registered: jupyter\.widget\.control|: [0-9a-f-]{36})")
"""JupyterLab asks a new kernel for its widgets, before anything in there has imported ipywidgets: this is what it is told."""

# What a widget's callback raises belongs to no cell, so the kernel's messages are listened to as well.
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

# The command's own result can't be handed over to the test: only that it has ended.
_RUN_ALL = """() => {
    window.dshRan = false;
    window.jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { window.dshRan = true; });
}"""

_CELLS = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells]
    .filter(cell => cell.type === 'code')
    .map(cell => ({source: cell.sharedModel.source, count: cell.executionCount, outputs: cell.outputs.toJSON()}))"""


@contextlib.contextmanager
def opened(browser: Browser, lab: Lab, notebook: str) -> Iterator["NotebookPage"]:
    """A notebook in a page without memory of others; at the end the browser and the kernel may have complained of nothing."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with browser.new_context(viewport=VIEWPORT) as context:
        page = NotebookPage(context.new_page())
        page.open(lab, notebook)
        yield page
    assert not page.complaints, "\n".join(["complaints of the browser:", *page.complaints])


class NotebookPage:
    """One notebook, open in a browser's page. `complaints` are the errors of the page, of its console and of the kernel so far."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))

    def open(self, lab: Lab, notebook: str) -> None:
        """Open a notebook of the server's folder; returns when its kernel has answered."""
        self.page.goto(lab.page(notebook))
        self.page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=OPEN_MS)
        self.page.evaluate(_READY)

    def run_all(self) -> list[dict[str, Any]]:
        """Run all cells; returns the code cells with their `source`, execution `count` and `outputs`."""
        self.page.evaluate(_RUN_ALL)
        self.page.wait_for_function("() => window.dshRan", timeout=RUN_MS)
        return list(self.page.evaluate(_CELLS))

    def use_theme(self, name: str) -> None:
        """As a person would in the menu; returns when the page has its colours."""
        self.page.evaluate(
            "name => { window.jupyterapp.commands.execute('apputils:change-theme', {theme: name}); }", name
        )
        self.page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)

    def see(self, selector: str) -> Locator:
        """The first element of that selector, scrolled into view once it is there."""
        element = self.page.locator(selector).first
        element.scroll_into_view_if_needed()
        return element

    def picture(self, name: str, selector: str | None = None) -> None:
        """Keep what the browser shows, of the first such element or of all, as a PNG."""
        shown = self.page if selector is None else self.page.locator(selector).first
        shown.screenshot(path=PICTURES / f"{name}.png", style=UNDER_THE_MOUSE)

    def _note(self, text: str) -> None:
        if not NOISE.fullmatch(text):
            self.complaints.append(text)


def write_notebook(lab: Lab, name: str, *cells: str) -> str:
    """Put a notebook of these code cells where the server shows it; returns its name."""
    # Without the name of a kernel JupyterLab would ask for one in a dialog.
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel)
    nbformat.write(document, lab.root / name)
    return name
