"""The explorer answers a browser's comm messages in a real kernel, and its notebook is readable without one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbconvert import HTMLExporter, MarkdownExporter
from places import ROOT
from widget_helpers import JUMP, layered_history

pytestmark = pytest.mark.slow

PATIENCE_S = 120
VIEW = "application/vnd.jupyter.widget-view+json"


TYPO, BAR = 6, 7
"""The cells with an error: one with a name that is not there, and one whose work breaks off half-way."""
BROKEN = """from dshistory.display.cell_bar import CellBar
bar = CellBar(100, description="reading", patience_s=0)
bar.update(52)
h.bisect(lambda c: bar.close() or 1 / 0, quiet=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_history(tmp_path_factory.mktemp("kernel") / "history").root


@pytest.fixture(scope="module")
def executed(root: Path) -> nbformat.NotebookNode:
    cells = [
        f"import dshistory\nh = dshistory.open({str(root)!r})\ne = h.explore()\ne",
        f"e.select('h.1', {JUMP})\ne.wait()\nprint(e.code)",
        "e.pick(30, 40)\ne.wait()\nassert eval(e.code).to_arrow() == e.table.to_arrow()\ne.close()",
        "%load_ext dshistory\n%dshistory explore h.1.*",
        "w = dshistory.watch(seconds=0.05)\nw",
        "h.layers().plot()",
        "h.tensor('head.wieght')",
        BROKEN,
        "w.close()\nimport threading\nprint([t.name for t in threading.enumerate() if t.name.startswith('dshistory')])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(
        notebook, timeout=PATIENCE_S, allow_errors=True, resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.outputs]


def test_a_notebook_runs_and_nothing_is_printed_by_threads(executed: nbformat.NotebookNode) -> None:
    printed = [output.text for output in outputs(executed) if output.output_type == "stream"]
    assert printed == ["h.trajectory('h.1.mlp.weight', metric='relative_update')\n", "[]\n"]
    shown = [output.data for output in outputs(executed) if "data" in output]
    assert sum({VIEW, "text/html", "text/plain"} <= data.keys() for data in shown) == 3
    assert not [output for cell in executed.cells[:TYPO] for output in cell.outputs if output.output_type == "error"]


def test_the_file_holds_no_figure_of_a_widget(executed: nbformat.NotebookNode) -> None:
    state = executed.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    assert not [model for model in state.values() if "plotly" in str(model["state"].get("_anywidget_id", ""))]
    assert (
        not {output.data[VIEW]["model_id"] for output in outputs(executed) if VIEW in output.get("data", {})}
        & state.keys()
    )
    assert len(nbformat.writes(executed)) < 500_000


def test_a_page_of_plain_nbconvert_shows_tables_and_figures(executed: nbformat.NotebookNode) -> None:
    html, _ = HTMLExporter().from_notebook_node(executed)
    assert html.count("background:#") > 10, "the table of colours, not a widget that needs a kernel"
    assert '<script type="application/vnd.jupyter.widget-view+json">' not in html
    assert "data:image/png;base64" in html, "the heat map of layers().plot()"


def test_a_bar_of_progress_is_gone_when_its_work_ends(executed: nbformat.NotebookNode) -> None:
    (bar,) = executed.cells[BAR].outputs[:1]
    assert bar.data == {"text/plain": "", "text/html": ""}
    assert "52" not in str(executed.cells[BAR].outputs[:1])


def test_a_typo_in_a_cell_gives_its_line_and_the_message(executed: nbformat.NotebookNode) -> None:
    first, line, message = executed.cells[TYPO].outputs[0].traceback
    assert first == "in a cell, line 1:"
    assert line.strip() == "h.tensor('head.wieght')"
    assert message.startswith("NotFoundError: no tensor fits 'head.wieght'")
    (failed,) = [output for output in executed.cells[BAR].outputs if output.output_type == "error"]
    assert failed.traceback[0] == "in a cell, line 4:"
    assert "ZeroDivisionError: division by zero" in failed.traceback, "the user's own error stands before ours"


def test_without_a_kernel_there_is_a_table_of_colours_and_the_line_of_code(executed: nbformat.NotebookNode) -> None:
    notebook = nbformat.from_dict(json.loads(json.dumps(executed)))
    del notebook.metadata["widgets"]
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert "background:#" in html
    assert "h.layers(metric='relative_update')" in html
    static = outputs(notebook)[0].data["text/html"]
    assert "<script" not in static
    assert len(static) < 20_000
    assert "h.1" in static
    markdown, _ = MarkdownExporter().from_notebook_node(notebook)
    assert "h.1" in markdown


class Browser:
    """This is the other end of a kernel's comms."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.state: dict[str, dict[str, Any]] = {}

    def run(self, code: str) -> str:
        """Execute code, take in all comm messages until it ends, and return what is printed."""
        sent = self._client.execute(code)
        printed = ""
        while True:
            message = self._client.get_iopub_msg(timeout=PATIENCE_S)
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
            printed += content["text"] if kind == "stream" else ""
            self._take(kind, content)
            if message["parent_header"].get("msg_id") == sent and content.get("execution_state") == "idle":
                return printed

    def model(self, css_class: str) -> str:
        (found,) = [key for key, state in self.state.items() if css_class in state.get("_dom_classes", ())]
        return found

    def send(self, model: str, **state: Any) -> None:
        data = {"method": "update", "state": state, "buffer_paths": []}
        content = {"comm_id": model, "data": data}
        self._client.shell_channel.send(self._client.session.msg("comm_msg", content))

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "comm_open":
            self.state[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["data"].get("method") in ("update", "echo_update"):
            self.state.setdefault(content["comm_id"], {}).update(content["data"]["state"])


@pytest.fixture
def browser(root: Path) -> Iterator[Browser]:
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT))
    try:
        browser = Browser(client)
        browser.run(f"import dshistory\nh = dshistory.open({str(root)!r})\ne = h.explore()\ne")
        yield browser
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_gestures_of_a_browser_are_answered(browser: Browser) -> None:
    metrics = browser.state[browser.model("dsh-metric")]["_options_labels"]
    browser.send(browser.model("dsh-metric"), index=list(metrics).index("norm"))
    assert browser.run("e.wait(); print(e.code)") == "h.layers(metric='norm')\n"
    assert browser.state[browser.model("dsh-code")]["value"] == "h.layers(metric='norm')"
    browser.send(browser.model("dsh-range"), index=[1, 3])
    browser.send(browser.model("dsh-filter"), value="h.1.*")
    assert browser.run("e.wait(); print(e.code)") == "h.layers('h.1.*', metric='norm', first=10, last=30)\n"
    browser.send(browser.model("dsh-filter"), value="h.one")
    browser.run("e.wait()")
    assert "no tensor fits" in browser.state[browser.model("dsh-status")]["value"]


def test_a_click_is_answered_while_a_cell_waits(browser: Browser) -> None:
    """The worker's drawing reaches the page although the kernel's own thread is busy all the time."""
    points = {"xs": [JUMP], "ys": ["h.1"], "trace_indexes": [3], "point_indexes": [[1, 4]]}
    click = {"event_type": "plotly_click", "points": points, "device_state": None, "selector": None}
    browser.send(browser.model("dsh-figure"), _js2py_pointsCallback=click)
    assert browser.run("e.wait(); print(e.code)").startswith("h.trajectory('h.1.mlp.weight'")
    assert "h.1.mlp.weight" in browser.state[browser.model("dsh-code")]["value"]
