"""How a figure is shown: in a notebook by plotly, with a small picture beside it for where plotly.js is not; elsewhere
in a browser."""

import contextlib
import webbrowser
from collections.abc import Iterator
from typing import Any, Final

from catalog.errors import SetupError
from dshistory.display.svg import svg

__all__ = ["ShownFigure"]

_PLOTLY: Final = "application/vnd.plotly.v1+json"


class ShownFigure:
    """The first base of a figure's class.

    A page that plain nbconvert makes has no renderer for plotly's own type: it would be blank there."""

    def _ipython_display_(self) -> None:
        figure: Any = self
        bundle = figure._repr_mimebundle_()
        if _PLOTLY not in bundle:
            with _a_browser():
                super()._ipython_display_()  # type: ignore[misc]
            return
        from IPython.display import display

        display({**bundle, "image/svg+xml": svg(figure.to_plotly_json())}, raw=True)

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Show the figure, as plotly does. Raises SetupError, with the way to save it, where there is no browser."""
        with _a_browser():
            super().show(*args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def _a_browser() -> Iterator[None]:
    try:
        yield
    except webbrowser.Error as error:
        raise SetupError(
            "there is no browser here that could show the figure; save it with .write_html('figure.html')"
        ) from error
