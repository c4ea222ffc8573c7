"""Widgets that no executed notebook keeps: their models are announced to the page, but not as an output of the cell.

Whatever executes a notebook without a page (nbconvert, papermill) collects the models that its cells announce, and
writes them into the file: 5 MB for each figure. An exported page then prefers the widget, which needs a kernel and a
network, to the table beside it. It hears the messages of the cell alone; a page hears all, so there nothing changes.
"""

import sys
from contextvars import ContextVar, copy_context

__all__ = ["Unsaved"]


class Unsaved:
    """The first base of a widget's class."""

    def open(self) -> None:
        """Announce the model; ipywidgets calls this once, when the widget is made."""
        kernels = sys.modules.get("ipykernel.kernelbase")
        kernel = kernels.Kernel.instance() if kernels is not None and kernels.Kernel.initialized() else None
        # ipykernel has no public way to send a message for no cell. Where this one is missing, the file is larger.
        cell = getattr(kernel, "_shell_parent", None)
        context = copy_context()
        if isinstance(cell, ContextVar):
            context.run(cell.set, {})
        context.run(super().open)  # type: ignore[misc]
