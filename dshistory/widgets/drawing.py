"""Draws tables as the traces of the explorer's one figure; each function sends its changes as one message.

Plotly renders tags in labels, so every name goes through `_plain`. JSON has no NaN and no infinity: both become gaps,
except that an infinite cell of a heat map gets the highest colour with the sign of infinity written in it.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dshistory.display.formats import text_of
from dshistory.display.table import Table
from dshistory.trends.histogram import HistogramTable
from dshistory.trends.layers import LayersTable
from dshistory.widgets.scale import Scale

__all__ = ["draw_anomalies", "draw_detail", "draw_heat", "draw_histogram", "draw_picked", "draw_range", "draw_timeline"]


def draw_timeline(figure: Any, rows: Table, steps: Sequence[int], *, name: str) -> None:
    """Draw a metric of every step (columns step, value), with the checkpoints on it."""
    values = {row["step"]: _finite(row["value"]) for row in rows}
    with figure.batch_update():
        _trace(figure, "metric").update(x=list(values), y=list(values.values()))
        heights = [values.get(step) if values else 0.0 for step in steps]
        _trace(figure, "checkpoints").update(x=list(steps), y=heights, text=["checkpoint"] * len(steps))
        figure.layout.yaxis.title.text = _plain(name)


def draw_anomalies(figure: Any, found: Mapping[int, Sequence[str]]) -> None:
    """Mark the steps with anomalies; their descriptions are the text of the marks."""
    heights = dict(zip(_trace(figure, "metric").x or (), _trace(figure, "metric").y or (), strict=True))
    known = [height for height in heights.values() if height is not None]
    with figure.batch_update():
        _trace(figure, "anomalies").update(
            x=list(found),
            y=[heights.get(step) if heights.get(step) is not None else max(known, default=0.0) for step in found],
            text=["<br>".join(map(_plain, _some(lines))) for lines in found.values()],
        )


def draw_heat(figure: Any, table: LayersTable | None) -> None:
    """Draw the heat map, layers by steps; None clears it. `Scale` gives the colours."""
    steps, _, values = table.grid() if table is not None else ([], [], [])
    scale = Scale(values)
    infinite = any(_infinite(value) for line in values for value in line)
    metric = table.metric if table is not None else ""
    with figure.batch_update():
        _trace(figure, "heat").update(
            x=steps,
            y=[_plain(label) for label in table.labels()] if table is not None else [],
            z=[[None if value is None else scale(value) for value in line] for line in values],
            customdata=[[_finite(value) for value in line] for line in values],
            text=[["∞" if _infinite(value) else "" for value in line] for line in values] if infinite else None,
            hovertemplate=(
                f"%{{y}}, step %{{x}}<br>{metric} %{{customdata:.4g}}{'%{text}' if infinite else ''}<extra></extra>"
            ),
            colorbar={"title": {"text": metric, "side": "right"}, **scale.ticks()},
        )


def draw_detail(figure: Any, rows: Table | None, *, metric: str) -> None:
    """Draw trajectories (columns name, kind, step, value) with gaps between them; None clears them."""
    x: list[int | None] = []
    y: list[float | None] = []
    names: list[str] = []
    for row in rows or ():
        name = _plain(f"{row['name']} ({row['kind']})")
        if names and names[-1] != name:
            x, y, names = [*x, None], [*y, None], [*names, ""]
        x.append(row["step"])
        y.append(_finite(row["value"]))
        names.append(name)
    with figure.batch_update():
        _trace(figure, "detail").update(
            x=x, y=y, text=names, hovertemplate="%{text}<br>step %{x}, %{y:.4g}<extra></extra>"
        )
        figure.layout.yaxis3.update(visible=bool(names), title={"text": metric})
        figure.layout.annotations = [
            {
                "text": ", ".join(_some(sorted({name for name in names if name}), most=3)),
                "showarrow": False,
                **{"x": 0, "xref": "paper", "xanchor": "left"},
                **{"y": 1, "yref": "y3 domain", "yanchor": "bottom"},
            }
        ]


def draw_histogram(figure: Any, table: HistogramTable | None) -> None:
    """Draw the magnitudes of a tensor's elements over the steps; None clears them."""
    steps, exponents, shares = table.grid() if table is not None else ([], [], [])
    with figure.batch_update():
        _trace(figure, "histogram").update(
            x=steps, y=exponents, z=shares, hovertemplate="2^%{y}, step %{x}<br>%{z:.2%} of the elements<extra></extra>"
        )
        figure.layout.yaxis4.update(visible=bool(steps), title={"text": "elements"})


def draw_range(figure: Any, steps: Sequence[int]) -> None:
    """Set the axis of steps so that the cells of the first and the last step are seen whole."""
    if not steps:
        return
    room = max(0.5, (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2)
    figure.layout.xaxis.range = [steps[0] - room, steps[-1] + room]


def draw_picked(figure: Any, step: int) -> None:
    """Draw a line through all panels at the clicked step."""
    line = {"color": "#D55E00", "width": 1, "dash": "dot"}
    figure.layout.shapes = [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1, "line": line}
    ]


def _trace(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def _plain(text: str) -> str:
    """Return a text that plotly shows literally: without markup and control characters."""
    return escape(text_of(text))


def _infinite(value: float | None) -> bool:
    return value is not None and math.isinf(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _some(lines: Sequence[str], *, most: int = 8) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]
