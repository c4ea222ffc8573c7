"""Draws tables as the traces of the explorer's one figure; each function sends its changes as one message.

Every panel has a title that says what it shows, also while that is computed: then it ends with an ellipsis, and what
was there before is faint. Plotly renders tags in labels, so every name goes through `_plain`.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from dshistory.display.formats import text_of
from dshistory.display.plot import VERMILION, heat_cells
from dshistory.display.scale import Scale, drawn, drawn_name
from dshistory.display.table import Table
from dshistory.trends.histogram import HistogramTable
from dshistory.trends.layers_table import LayersTable
from dshistory.widgets import panels

__all__ = [
    "announce",
    "draw_anomalies",
    "draw_detail",
    "draw_heat",
    "draw_histogram",
    "draw_picked",
    "draw_range",
    "draw_timeline",
]

_FAINT: Final = 0.3
_LEGEND: Final = "│ checkpoint   ✕ anomaly: click for its diff"


def draw_timeline(figure: Any, rows: Table, steps: Sequence[int], *, name: str) -> None:
    """Draw a metric of every step (columns step, value), the checkpoints below it, and the anomalies on it."""
    values = {row["step"]: _finite(row["value"]) for row in rows}
    marked = list(_trace(figure, "anomalies").x or ())
    texts = dict(zip(marked, _trace(figure, "anomalies").text or (), strict=False))
    # In one batch the page would drop what one of the traces sets and another does not.
    with figure.batch_update():
        _trace(figure, "metric").update(x=list(values), y=list(values.values()), text=_beneath(values, texts))
    with figure.batch_update():
        _trace(figure, "checkpoints").update(x=list(steps), y=[0.0] * len(steps))
    with figure.batch_update():
        _trace(figure, "anomalies").y = _heights(values, marked)
        _set_title(figure, "timeline", _plain(f"{name} of every step   {_LEGEND}"))


def draw_anomalies(figure: Any, found: Mapping[int, Sequence[str]]) -> None:
    """Mark the steps with anomalies on the metric that is shown; their descriptions are the text of the marks."""
    metric = _trace(figure, "metric")
    values = dict(zip(metric.x or (), metric.y or (), strict=True))
    texts = {step: f"step {step}<br>" + "<br>".join(map(_plain, _some(lines))) for step, lines in found.items()}
    with figure.batch_update():
        _trace(figure, "anomalies").update(x=list(found), y=_heights(values, list(found)), text=list(texts.values()))
    metric.text = _beneath(values, texts)


def announce(figure: Any, titles: Mapping[str, str], *, step: int | None = None) -> None:
    """Say in the titles of panels what is being computed for them, and let what they show until then fade. With `step`,
    a line goes through all panels at the clicked step."""
    with figure.batch_update():
        for panel in titles:
            _trace(figure, panel).opacity = _FAINT
        _set_titles(figure, _titles(figure) | {panel: _plain(f"{title} …") for panel, title in titles.items()})
        if step is not None:
            draw_picked(figure, step)


def draw_heat(figure: Any, table: LayersTable | None, *, title: str) -> None:
    """Draw the heat map, layers by steps; None clears it."""
    if table is None:
        cells: dict[str, Any] = {"x": [], "y": [], "z": [], "customdata": [], "text": None, "hovertext": None}
    else:
        cells = heat_cells(table.picture())
        cells["colorbar"] = cells["colorbar"] | _beside(figure, "heat")
    with figure.batch_update():
        _trace(figure, "heat").update(**cells, opacity=1.0)
        _set_title(figure, "heat", _plain(title))


def draw_detail(figure: Any, rows: Table | None, *, title: str, metric: str, logarithmic: bool) -> None:
    """Draw trajectories (columns name, kind, step, value) with gaps between them; None removes the panels of one
    tensor. The axis is logarithmic on request, if there is something above zero."""
    x: list[int | None] = []
    y: list[float | None] = []
    names: list[str] = []
    for row in rows or ():
        name = _plain(f"{row['name']} ({row['kind']})")
        if names and names[-1] != name:
            x, y, names = [*x, None], [*y, None], [*names, ""]
        x.append(row["step"])
        value = _finite(row["value"])
        y.append(None if value is None else drawn(metric, value))
        names.append(name)
    _arrange(figure, detail=bool(names))
    with figure.batch_update():
        _trace(figure, "detail").update(
            x=x,
            y=y,
            text=names,
            opacity=1.0,
            hovertemplate="%{text}<br>step %{x}, " + _plain(drawn_name(metric)) + " %{y:.4g}<extra></extra>",
        )
        figure.layout.yaxis3.update(_detail_axis([value for value in y if value is not None], logarithmic=logarithmic))
        _set_title(figure, "detail", _plain(title))


def draw_histogram(figure: Any, table: HistogramTable | None, *, title: str) -> None:
    """Draw the magnitudes of a tensor's elements over the steps; None clears them."""
    steps, lines, shares = table.picture() if table is not None else ([], [], [])
    with figure.batch_update():
        _trace(figure, "histogram").update(
            x=steps,
            y=lines,
            z=shares,
            opacity=1.0,
            hovertemplate="%{y}, step %{x}<br>%{z:.2%} of the elements<extra></extra>",
            colorbar={"tickformat": ".0%", "nticks": 4, **_beside(figure, "histogram")},
        )
        _set_title(figure, "histogram", _plain(title))


def draw_range(figure: Any, steps: Sequence[int]) -> None:
    """Set the axis of steps so that the cells of the first and the last step are seen whole."""
    if not steps:
        return
    room = max(0.5, (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2)
    figure.layout.xaxis.range = [steps[0] - room, steps[-1] + room]


def draw_picked(figure: Any, step: int) -> None:
    """Draw a line through all panels at the clicked step."""
    line = {"color": VERMILION, "width": 1, "dash": "dot"}
    figure.layout.shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}
    ]


def _arrange(figure: Any, *, detail: bool) -> None:
    """Give the figure its panels, with or without those of one tensor. Not inside a batch, which would hide the new
    places from what reads them."""
    if detail == panels.is_shown(figure, "detail"):
        return
    figure.update_layout(**panels.axes(detail=detail))
    with figure.batch_update():
        _trace(figure, "heat").colorbar.update(**_beside(figure, "heat"))
        _trace(figure, "detail").visible = _trace(figure, "histogram").visible = detail
        _set_titles(figure, _titles(figure))


def _detail_axis(values: Sequence[float], *, logarithmic: bool) -> dict[str, Any]:
    """Return the options of the detail's axis. Plotly labels a short logarithmic axis with loose digits, so the ticks
    are those of a scale of colours."""
    scale = Scale([[value for value in values if value > 0]], logarithmic=True)
    if not (logarithmic and any(value > 0 for value in values)):
        return {"type": "linear", "tickvals": None, "ticktext": None, "nticks": 5}
    ticks = scale.ticks()
    return {"type": "log", "tickvals": [10**value for value in ticks["tickvals"]], "ticktext": ticks["ticktext"]}


def _set_title(figure: Any, panel: str, text: str) -> None:
    """Set the title of a panel, a text without markup, beside those of the others; once in a batch."""
    _set_titles(figure, _titles(figure) | {panel: text})


def _titles(figure: Any) -> dict[str, str]:
    return {note.name: note.text for note in figure.layout.annotations}


def _set_titles(figure: Any, titles: Mapping[str, str]) -> None:
    figure.layout.annotations = [
        {
            "name": panel,
            "text": text,
            "showarrow": False,
            "visible": panels.is_shown(figure, panel),
            "font": {"size": 12},
            **{"x": 0, "xref": "paper", "xanchor": "left"},
            **{"y": panels.place_of(figure, panel)[1], "yref": "paper", "yanchor": "bottom"},
        }
        for panel, text in titles.items()
    ]


def _beside(figure: Any, panel: str) -> dict[str, Any]:
    bottom, top = panels.place_of(figure, panel)
    return {"y": (bottom + top) / 2, "len": top - bottom, "thickness": 10, "x": 1.0, "xpad": 6, "ypad": 0}


def _heights(values: Mapping[int, float | None], steps: Sequence[int]) -> list[float]:
    """Return the metric's value at each of these steps; where it has none, its highest one."""
    top = max((value for value in values.values() if value is not None), default=0.0)
    at = [values.get(step) for step in steps]
    return [top if value is None else value for value in at]


def _beneath(values: Mapping[int, float | None], texts: Mapping[int, str]) -> list[str]:
    """Return what the metric's points say below their own value: under the mouse, the line hides the mark on it."""
    return [f"<br>{texts[step]}" if step in texts else "" for step in values]


def _trace(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def _plain(text: str) -> str:
    """Return a text that plotly shows literally: without markup and control characters."""
    return escape(text_of(text))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _some(lines: Sequence[str], *, most: int = 8) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]
