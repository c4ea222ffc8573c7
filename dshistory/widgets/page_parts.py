"""The parts of the widget that need code in the page; the one module that imports anywidget, which is heavy."""

from collections.abc import Callable
from typing import Any

import anywidget
from traitlets import Unicode

__all__ = ["ResizeNotifier", "SortableRows"]


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
