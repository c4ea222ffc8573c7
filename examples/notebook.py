"""Run a notebook on a history and save it, also as one HTML file that needs neither a kernel nor a network."""

import os
import sys
from pathlib import Path

import nbformat
import plotly.io
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode

PLOTLY = "application/vnd.plotly.v1+json"


def execute(source: Path, *, history: Path, output: Path) -> tuple[Path, Path]:
    """Run `source` with $DSHISTORY set to `history`; return the executed notebook and its HTML, both in `output`."""
    notebook = nbformat.read(source, as_version=4)
    environment = {**os.environ, "DSHISTORY": str(history.absolute()), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(output)}},
        extra_arguments=["--log-level=ERROR"],
        store_widget_state=False,  # takes megabytes; the page shows the widgets' static view
    )
    client.execute(env=environment)
    executed = output / source.name
    nbformat.write(notebook, executed)
    page = executed.with_suffix(".html")
    page.write_text(as_html(notebook))
    return executed, page


def as_html(notebook: NotebookNode) -> str:
    """Return the executed notebook as a page that contains one copy of plotly.js, which draws the figures."""
    library: bool | str = "inline"
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get(PLOTLY)
            if figure is not None:
                output.data["text/html"] = plotly.io.to_html(
                    dict(figure), include_plotlyjs=library == "inline", full_html=False, validate=False
                )
                library = False
    # Without the address of require.js the page makes no request for it, and plotly.js becomes a global object, because
    # it finds no module loader.
    page, _ = HTMLExporter(require_js_url="", mathjax_url="").from_notebook_node(notebook)
    return page


if __name__ == "__main__":
    source, history, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    for path in execute(source, history=history, output=output):
        print(path)
