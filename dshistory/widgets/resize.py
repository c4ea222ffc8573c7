"""Lets the figure follow the width of the page: plotly draws before it is attached, and hears only of resized windows."""

import anywidget

__all__ = ["Fit"]


class Fit(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows nothing; tells the page that its window was resized whenever its own width changes."""

    _esm = """
    export default {
      render({ el }) {
        const observer = new ResizeObserver(() => window.dispatchEvent(new Event("resize")));
        observer.observe(el);
        return () => observer.disconnect();
      },
    };
    """
