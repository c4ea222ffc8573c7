"""Lets the figure follow the width of the page; the one module that imports anywidget, which is heavy.

Plotly draws before it is attached to the page, and afterwards listens to the resizing of the window alone.
"""

import anywidget

__all__ = ["ResizeNotifier"]


class ResizeNotifier(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows nothing; sends the page's resize event whenever its own width changes."""

    _esm = """
    export default {
      render({ el }) {
        const observer = new ResizeObserver(() => window.dispatchEvent(new Event("resize")));
        observer.observe(el);
        return () => observer.disconnect();
      },
    };
    """
