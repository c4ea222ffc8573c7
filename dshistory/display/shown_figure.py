"""How a figure is shown in a notebook: by plotly, with a small picture beside it for where plotly.js is not."""

from typing import Any, Final

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
            super()._ipython_display_()  # type: ignore[misc]
            return
        from IPython.display import display

        display({**bundle, "image/svg+xml": svg(figure.to_plotly_json())}, raw=True)
