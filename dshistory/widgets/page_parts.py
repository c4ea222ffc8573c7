"""The parts of the widget that need code in the page; the one module that imports anywidget, which is heavy."""

from collections.abc import Callable
from typing import Any

import anywidget
from traitlets import Int, List, Unicode

__all__ = ["ChoosableRows", "ResizeNotifier", "SortableRows"]


class ResizeNotifier(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows nothing; sends the page's resize event whenever its own width changes, and gives the text of the figure the
    colour of the page's theme.

    Plotly draws before it is attached to the page, and afterwards listens to the resizing of the window alone. Whenever
    the kernel sets a height, it also fixes the width of that moment, which is taken back here."""

    _esm = """
    export default {
      render({ el }) {
        const observer = new ResizeObserver(() => {
          const figure = el.closest(".dsh-explorer")?.querySelector(".dsh-figure");
          if (figure?.layout) delete figure.layout.width;
          window.dispatchEvent(new Event("resize"));
        });
        observer.observe(el);
        return () => observer.disconnect();
      },
    };
    """
    _css = """
    .dsh-figure .main-svg > g:not(.hoverlayer) text {
      fill: var(--jp-content-font-color1, var(--vscode-editor-foreground)) !important;
    }
    """


class ChoosableRows(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows HTML with a table, of which rows can be chosen; `on_row` is called with the number of the row that is
    clicked, from 0. A drawing beside it gets the colour of the page's theme."""

    value = Unicode().tag(sync=True)
    """The HTML, whose texts are escaped."""
    chosen = List(Int()).tag(sync=True)
    """The numbers of the rows that are marked as chosen."""

    _esm = """
    export default {
      render({ model, el }) {
        const rows = () => [...el.querySelectorAll("tbody tr")];
        const mark = () => rows().forEach((row, number) => {
          row.setAttribute("aria-selected", model.get("chosen").includes(number));
        });
        const show = () => {
          el.innerHTML = model.get("value");
          rows().forEach((row, number) => {
            row.title = "compare this run";
            row.tabIndex = 0;
            const choose = () => model.send({ row: number });
            row.addEventListener("click", choose);
            row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(); });
          });
          mark();
        };
        show();
        model.on("change:value", show);
        model.on("change:chosen", mark);
      },
    };
    """
    _css = """
    .dsh-runs { max-height: 20em; overflow: auto; }
    .dsh-runs tbody tr { cursor: pointer; }
    .dsh-runs tbody tr:hover { text-decoration: underline; }
    .dsh-runs tbody td:first-child { white-space: pre; font-family: var(--jp-code-font-family, monospace); }
    .dsh-runs tbody tr[aria-selected="true"] { box-shadow: inset 4px 0 #D55E00; font-weight: 600; }
    .dsh-comparison svg { max-width: 100%; height: auto; }
    .dsh-comparison svg text { fill: var(--jp-content-font-color1, var(--vscode-editor-foreground, #7a828c)); }
    """

    def on_row(self, react: Callable[[int], None]) -> None:
        """Call `react` with each row that is clicked."""

        def hear(_: Any, content: Any, __: Any) -> None:
            if isinstance(content, dict) and isinstance(content.get("row"), int):
                react(content["row"])

        self.on_msg(hear)


class SortableRows(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows HTML with a table; `on_sort` is called with the number of the column whose head is clicked, from 0."""

    value = Unicode().tag(sync=True)
    """The HTML, whose texts are escaped."""

    _esm = """
    export default {
      render({ model, el }) {
        const show = () => {
          el.innerHTML = model.get("value");
          el.querySelectorAll("thead th").forEach((head, column) => {
            head.title = "sort by this column";
            head.tabIndex = 0;
            const sort = () => model.send({ sort: column });
            head.addEventListener("click", sort);
            head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
          });
        };
        show();
        model.on("change:value", show);
      },
    };
    """
    _css = ".dsh-diff thead th { cursor: pointer; } .dsh-diff thead th:hover { text-decoration: underline; }"

    def on_sort(self, react: Callable[[int], None]) -> None:
        """Call `react` with each column that is clicked."""

        def hear(_: Any, content: Any, __: Any) -> None:
            if isinstance(content, dict) and isinstance(content.get("sort"), int):
                react(content["sort"])

        self.on_msg(hear)
