"""The panels of the explorer's figure: their heights, axes and titles; `drawing` fills them.

All panels have one axis of steps. Those of one tensor appear when one is opened, and the figure grows by them: before,
they would be blank.
"""

from typing import Any, Final

from dshistory.display.plot import BLUE, GREEN, VERMILION, figure_widget, grid_axis

__all__ = ["axes", "is_shown", "make_figure", "place_of"]

_TITLE_PX: Final = 24
"""The room above each panel, for its title."""
_BOTTOM_PX: Final = 42
_HEIGHTS_PX: Final = {"timeline": 96, "heat": 250, "detail": 92, "histogram": 100}
_HEAT_ALONE_PX: Final = 330
_AXES: Final = {"timeline": "yaxis", "heat": "yaxis2", "detail": "yaxis3", "histogram": "yaxis4"}


def make_figure() -> Any:
    """Return the figure as a widget, empty.

    The traces are metric, checkpoints and anomalies; heat; detail; histogram. The vertical axes are yaxis to yaxis4,
    one for each panel; yaxis5 is that of the marks of checkpoints, at the bottom of the first panel. The annotations
    are the titles of the panels, under their names."""
    text = "%{text}<extra></extra>"
    line = {"color": BLUE, "width": 1.5}
    rug = {"color": BLUE, "size": 7, "symbol": "line-ns", "line": {"color": BLUE, "width": 1}}
    cross = {"color": VERMILION, "size": 9, "symbol": "x"}
    cells: dict[str, Any] = {"type": "heatmap", "colorscale": "Cividis", "hoverongaps": False}
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "name": "metric", "mode": "lines", "line": line},
        {"type": "scatter", "name": "checkpoints", "mode": "markers", "yaxis": "y5", "marker": rug},
        {"type": "scatter", "name": "anomalies", "mode": "markers", "marker": cross, "hovertemplate": text},
        {"name": "heat", "yaxis": "y2", **cells},
        {
            "type": "scatter",
            "name": "detail",
            "mode": "lines+markers",
            "yaxis": "y3",
            "line": {"color": GREEN, "width": 1.5},
            "marker": {"size": 4},
        },
        {"name": "histogram", "yaxis": "y4", **cells},
    ]
    traces[0]["hovertemplate"] = "step %{x}, %{y:.4g}%{text}<extra></extra>"
    traces[1]["hovertemplate"] = "checkpoint at step %{x}<extra></extra>"
    layout = {
        "showlegend": False,
        "hovermode": "closest",
        "autosize": True,
        "margin": {"l": 50, "r": 10, "t": 0, "b": 0},
    }
    return figure_widget(traces, layout | axes(detail=False))


def axes(*, detail: bool) -> dict[str, Any]:
    """Return the layout of the axes and the height of the figure, with or without the panels of one tensor."""
    heights = dict(_HEIGHTS_PX) if detail else {"timeline": _HEIGHTS_PX["timeline"], "heat": _HEAT_ALONE_PX}
    whole = sum(heights.values()) + _TITLE_PX * len(heights) + _BOTTOM_PX
    layout: dict[str, Any] = {"height": whole}
    top = whole
    for name, height in heights.items():
        top -= _TITLE_PX
        domain = [(top - height) / whole, top / whole]
        layout[_AXES[name]] = {**grid_axis(), "domain": domain, "automargin": True, "visible": True}
        top -= height
    layout["yaxis2"] |= {"type": "category", "autorange": "reversed"}
    for name in _AXES.keys() - heights.keys():
        layout[_AXES[name]] = {"visible": False, "domain": [0.0, 0.001]}
    if detail:
        layout["yaxis4"] |= {"type": "category"}
    layout["yaxis5"] = {
        "range": [-0.06, 1.0],
        "visible": False,
        "fixedrange": True,
        "overlaying": "y",
    }
    last = list(heights)[-1]
    layout["xaxis"] = {"anchor": _AXES[last].replace("axis", ""), "title": {"text": "step", "standoff": 4}}
    return layout


def place_of(figure: Any, panel: str) -> tuple[float, float]:
    """Return the bottom and the top of a panel as shares of the figure's height."""
    bottom, top = figure.layout[_AXES[panel]].domain
    return float(bottom), float(top)


def is_shown(figure: Any, panel: str) -> bool:
    """Return whether the figure has that panel now."""
    return bool(figure.layout[_AXES[panel]].visible)
