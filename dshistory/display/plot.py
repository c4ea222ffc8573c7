"""Figures from tables; the only file that imports plotly.

The colours are Okabe and Ito's, which people with any common kind of colour vision can distinguish. Backgrounds are
transparent and text is mid-grey, for light and dark pages alike. Plotly renders tags in labels, so names are escaped.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import SetupError
from dshistory.display.formats import text_of
from dshistory.display.scale import RELATIVE_COLOURS, Picture, drawn, drawn_name
from dshistory.display.shown_figure import ShownFigure
from dshistory.display.unsaved import Unsaved

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from dshistory.display.table import Table

__all__ = [
    "BLUE",
    "GREEN",
    "INK",
    "VERMILION",
    "anomaly_marks",
    "attributions",
    "changed_tensors",
    "curves",
    "figure_widget",
    "grid_axis",
    "heat_cells",
    "heat_map",
    "layers_by_step",
    "loss_timeline",
    "magnitudes",
    "path_in_plane",
    "runs_by_step",
    "trajectories",
    "tree_of_runs",
]

BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
_COLOURS: Final = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
_SYMBOLS: Final = ("x", "diamond", "circle", "square", "triangle-up")
INK: Final = "#7a828c"


def loss_timeline(metrics: "Table", checkpoints: "Table") -> "go.Figure":
    """Plot the loss of every step, with a line for each run and a mark for each checkpoint.

    `metrics` has the columns run, step and value; `checkpoints` has run, step and loss."""
    figure = _figure()
    for colour, run in zip(cycle(_COLOURS), pc.unique(metrics["run"]).to_pylist(), strict=False):
        line = _of_run(metrics, run)
        marks = _of_run(checkpoints, run)
        lines: dict[str, Any] = {"x": line["step"].to_pylist(), "y": line["value"].to_pylist()}
        points: dict[str, Any] = {"x": marks["step"].to_pylist(), "y": marks["loss"].to_pylist()}
        figure.add_scatter(
            **lines, mode="lines", name=_plain(run), legendgroup=_plain(run), line={"color": colour, "width": 1.5}
        )
        figure.add_scatter(
            **points,
            mode="markers",
            name=_plain(f"{run} checkpoints"),
            legendgroup=_plain(run),
            marker={"color": colour, "size": 7, "symbol": "diamond-open"},
            hovertemplate="step %{x}, loss %{y:.4g}<extra>checkpoint</extra>",
        )
    _explain_if(
        figure, not any(value is not None for trace in figure.data for value in trace.y), "no loss was recorded"
    )
    return figure.update_layout(xaxis_title="step", yaxis_title="loss", height=360)


def tree_of_runs(rows: "Sequence[Mapping[str, Any]]") -> "go.Figure":
    """Plot runs as lines over their steps, one below the other, each joined to its parent where it forked.

    A row has run, parent ("RUN:STEP" or None), kind, changed, first, last and loss.
    """
    figure = _figure()
    lanes = {row["run"]: -place for place, row in enumerate(rows)}
    for colour, row in zip(cycle(_COLOURS), rows, strict=False):
        first, last, lane = row["first"], row["last"], lanes[row["run"]]
        x, y = ([first, last], [lane, lane]) if last is not None else ([], [])
        parent, _, fork = (row["parent"] or "").rpartition(":")
        if parent in lanes:
            x, y = [int(fork), int(fork), *x], [lanes[parent], lane, *y]
        changed = f", changed: {row['changed']}" if row["changed"] not in (None, "nothing") else ""
        loss = "" if row["loss"] is None else f", loss {row['loss']:.4g}"
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=_plain(row["run"]),
            line={"color": colour, "width": 2, "dash": "dot" if row["kind"] == "replay" else "solid"},
            hovertemplate=_plain(f"{row['run']}: {row['kind']}{changed}{loss}") + "<br>step %{x}<extra></extra>",
        )
    _explain_if(figure, not rows, "no run yet")
    figure.update_yaxes(tickvals=list(lanes.values()), ticktext=[_plain(run) for run in lanes], zeroline=False)
    return figure.update_layout(xaxis_title="step", showlegend=False, height=120 + 40 * len(rows))


def runs_by_step(lines: "Mapping[str, tuple[Sequence[int], Sequence[float | None]]]", *, value: str) -> "go.Figure":
    """Plot a line for each run: its name -> steps and values. Unknown values leave gaps."""
    figure = _figure()
    for colour, dash, (name, (steps, values)) in zip(cycle(_COLOURS), _dashes(), lines.items(), strict=False):
        line = {"color": colour, "width": 1.5, "dash": dash}
        figure.add_scatter(x=list(steps), y=list(values), mode="lines", name=_plain(name), line=line)
    _explain_if(figure, not any(value is not None for trace in figure.data for value in trace.y), f"no {value}")
    return figure.update_layout(xaxis_title="step", yaxis_title=_plain(value), height=360)


def changed_tensors(rows: "Table", *, metric: str, top: int) -> "go.Figure":
    """Plot the first `top` rows of a diff whose metric is finite as horizontal bars, in the order of the diff."""
    known = [row for row in rows if row[metric] is not None]
    first = [row for row in known if math.isfinite(row[metric])][:top]
    from_zero = sum(not math.isfinite(row[metric]) for row in known)
    title = metric.replace("_", " ")
    figure = _figure()
    for colour, kind in zip(cycle(_COLOURS), dict.fromkeys(row["kind"] for row in first), strict=False):
        of_kind = [row for row in first if row["kind"] == kind]
        figure.add_bar(
            x=[row[metric] for row in of_kind],
            y=[_label(row, first) for row in of_kind],
            orientation="h",
            name=_plain(kind),
            marker={"color": colour},
            hovertemplate="%{y}<br>" + title + " %{x:.4g}<extra></extra>",
        )
    order = [_label(row, first) for row in first]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order, automargin=True)
    _explain_if(figure, not first, "the two checkpoints have nothing to compare")
    if from_zero:
        title += f" ({from_zero} with a norm of zero before are not drawn)"
    return figure.update_layout(xaxis_title=title, height=max(200, 120 + 22 * len(first)), barmode="stack")


def attributions(rows: "Table", *, top: int) -> "go.Figure":
    """Plot the first `top` rows of an attribution: bars for the columns alone and without, a mark for the estimate."""
    first = list(rows.top(top))
    names = [_plain(row["name"]) for row in first]
    figure = _figure()
    for colour, column in ((BLUE, "alone"), (ORANGE, "without")):
        figure.add_bar(
            x=[row[column] if math.isfinite(row[column]) else None for row in first],
            y=names,
            orientation="h",
            name=column,
            marker={"color": colour},
            hovertemplate="%{y}<br>" + column + " %{x:.4g}<extra></extra>",
        )
    marks = [row["estimate"] for row in first]
    if any(mark is not None for mark in marks):
        marker = {"color": VERMILION, "size": 9, "symbol": "x"}
        figure.add_scatter(x=marks, y=names, mode="markers", name="first-order estimate", marker=marker)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names, automargin=True)
    _explain_if(figure, not first, "the model has nothing to exchange")
    return figure.update_layout(
        xaxis_title="change of the loss", barmode="group", height=max(220, 130 + 36 * len(first)), showlegend=True
    )


def trajectories(rows: "Table", *, metric: str, top: int) -> "go.Figure":
    """Plot the values over the steps, with a line for each of the `top` tensors with the largest maximum; where several
    runs have the same step, a line for each tensor and run. A cosine is drawn as its distance from 1, on a logarithmic
    axis."""
    data = rows.to_arrow()
    several = len({*zip(data["run"].to_pylist(), data["step"].to_pylist(), strict=True)}) > len(
        set(data["step"].to_pylist())
    )
    lines: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["name"], row["kind"], row["run"] if several else ""), []).append(row)

    def height(key: tuple[str, str, str]) -> float:
        known = [drawn(metric, row["value"]) for row in lines[key] if row["value"] is not None]
        return max(filter(math.isfinite, known), default=-math.inf)

    chosen = sorted(lines, key=height, reverse=True)[:top]
    first = [lines[key][0] for key in chosen]
    figure = _figure()
    for colour, dash, key in zip(cycle(_COLOURS), _dashes(), chosen, strict=False):
        figure.add_scatter(
            x=[row["step"] for row in lines[key]],
            y=[None if row["value"] is None else drawn(metric, row["value"]) for row in lines[key]],
            mode="lines+markers",
            name=f"{_label(lines[key][0], first)}{f', {_plain(key[2])}' if several else ''}",
            line={"color": colour, "width": 1.5, "dash": dash},
        )
    _explain_if(figure, not any(math.isfinite(height(key)) for key in chosen), f"no {metric} is known at any step")
    kind = "log" if metric == "cosine" else "linear"
    return figure.update_layout(
        xaxis_title="step", yaxis={"title": {"text": drawn_name(metric)}, "type": kind}, height=420
    )


def curves(rows: "Table", *, x: str, empty: str) -> "go.Figure":
    """Plot the column `value` over the column `x`, with a line for each name, and for each run where there are several;
    `rows` has the columns name and perhaps run. `empty` stands in a figure without a value."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["value"] is not None:
            lines.setdefault((row["name"], row.get("run", "")), []).append(row)
    several = len({run for _, run in lines}) > 1
    figure = _figure()
    for colour, dash, ((name, run), points) in zip(cycle(_COLOURS), _dashes(), lines.items(), strict=False):
        ordered = sorted(points, key=lambda row: row[x])
        figure.add_scatter(
            x=[row[x] for row in ordered],
            y=[row["value"] for row in ordered],
            mode="lines+markers",
            name=_plain(f"{name}, {run}" if several else name),
            line={"color": colour, "width": 1.5, "dash": dash},
        )
    _explain_if(figure, not lines, empty)
    title = next(iter(lines))[0] if len({name for name, _ in lines}) == 1 else "value"
    return figure.update_layout(xaxis_title=x, yaxis_title=_plain(title), height=380)


def heat_map(values: Any, *, x: list[str], y: list[str], value: str) -> "go.Figure":
    """Plot a matrix as colours; the scale Cividis looks the same with any colour vision, and works in grey."""
    figure = _figure()
    figure.add_heatmap(
        z=values,
        x=[_plain(label) for label in x],
        y=[_plain(label) for label in y],
        colorscale="Cividis",
        colorbar={"title": _plain(value)},
        hovertemplate="%{y}, %{x}<br>" + _plain(value) + " %{z:.4g}<extra></extra>",
    )
    _explain_if(figure, len(x) < 2, "fewer than two checkpoints to compare")
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure.update_layout(height=480)


def magnitudes(shares: Any, *, steps: list[int], lines: list[str], values: str) -> "go.Figure":
    """Plot the shares of a tensor's elements as colours, magnitude by step, with the smallest at the bottom. The labels
    of `lines` are markup; `values` says what they are of."""
    figure = _figure()
    figure.add_heatmap(
        x=steps,
        y=lines,
        z=shares,
        colorscale="Cividis",
        colorbar={"title": {"text": "share of the elements", "side": "right"}, "tickformat": ".0%"},
        hovertemplate="%{y}, step %{x}<br>%{z:.2%} of the elements<extra></extra>",
    )
    _explain_if(figure, not lines, "no element is finite")
    figure.update_yaxes(type="category", automargin=True, title=_plain(values))
    return figure.update_layout(xaxis_title="step", height=380)


def layers_by_step(picture: Picture) -> "go.Figure":
    """Plot the picture of a table of layers as colours, layer by step, with the colour scale of the explorer."""
    cells = heat_cells(picture)
    figure = _figure()
    figure.add_heatmap(**cells, hoverongaps=False)
    figure.data[0].colorbar.title = {"text": _plain(picture.name), "side": "right"}
    _explain_if(figure, not any(value is not None for line in picture.values for value in line), "no value is known")
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure.update_layout(xaxis_title="step", height=max(240, min(640, 130 + 20 * len(picture.lines))))


def heat_cells(picture: Picture) -> dict[str, Any]:
    """Return the options of a heat map's trace for the picture of a table of layers.

    JSON has no NaN and no infinity: both become gaps, except that an infinite cell has the highest colour and the sign
    of infinity in it. `customdata` are the values, and `hovertext` says from which step to which each column is."""
    scale, values = picture.scale, picture.values
    infinite = any(value is not None and math.isinf(value) for line in values for value in line)
    spans = [
        f"step {step}" if since is None else f"steps {since} → {step}"
        for step, since in zip(picture.steps, picture.since, strict=True)
    ]
    return {
        "x": picture.steps,
        "y": [_plain(line) for line in picture.lines],
        "z": [[None if value is None else scale(value) for value in line] for line in values],
        "zmin": scale.low,
        "zmax": max(scale.high, scale.low + 1e-12),
        "customdata": [
            [value if value is not None and math.isfinite(value) else None for value in line] for line in values
        ],
        "text": [["∞" if value is not None and math.isinf(value) else "" for value in line] for line in values]
        if infinite
        else None,
        # Whenever it draws, the page composes the text of every cell, which takes longer than all else.
        "texttemplate": "%{text}" if infinite else None,
        "hovertext": [spans] * len(picture.lines),
        "hovertemplate": (
            f"%{{y}}<br>%{{hovertext}}<br>{_plain(picture.name)} %{{customdata:.4g}}{'%{text}' if infinite else ''}"
            "<extra></extra>"
        ),
        "colorscale": RELATIVE_COLOURS if picture.relative else "Cividis",
        "colorbar": scale.ticks(),
    }


def path_in_plane(points: "Table") -> "go.Figure":
    """Plot checkpoints as points, joined in the order of their steps; `points` has the columns run, step, x and y. Both
    axes have one scale, for the distances are what the picture keeps."""
    figure = _figure()
    for dash, run in zip(_dashes(), pc.unique(points["run"]).to_pylist(), strict=False):
        of_run = _of_run(points, run)
        steps = of_run["step"].to_pylist()
        marker = {"color": steps, "coloraxis": "coloraxis", "size": 8}
        figure.add_scatter(
            x=of_run["x"].to_pylist(),
            y=of_run["y"].to_pylist(),
            mode="lines+markers",
            name=_plain(run),
            line={"color": INK, "width": 1, "dash": dash},
            marker=marker,
            customdata=steps,
            hovertemplate="step %{customdata}<extra>" + _plain(run) + "</extra>",
        )
    _explain_if(figure, len(points) < 2, "fewer than two checkpoints to compare")
    figure.update_yaxes(scaleanchor="x", scaleratio=1)
    scale = {"colorscale": "Cividis", "colorbar": {"title": "step"}}
    # The bar of colours stands where the legend would.
    return figure.update_layout(coloraxis=scale, legend={"orientation": "h"}, height=480)


def anomaly_marks(rows: "Table", *, top: int) -> "go.Figure":
    """Plot each anomaly as a mark at its step and tensor, for the `top` tensors that are first to have one; `rows` has
    the columns step, anomaly, kind, name, value and usual."""
    found = list(rows)
    shown = list(dict.fromkeys((row["name"], row["kind"]) for row in found))[:top]
    first = [{"name": name, "kind": kind} for name, kind in shown]
    labels = {key: _label(row, first) for key, row in zip(shown, first, strict=True)}
    figure = _figure()
    for colour, symbol, anomaly in zip(
        cycle(_COLOURS), cycle(_SYMBOLS), dict.fromkeys(row["anomaly"] for row in found), strict=False
    ):
        marks = [row for row in found if row["anomaly"] == anomaly and (row["name"], row["kind"]) in labels]
        figure.add_scatter(
            x=[row["step"] for row in marks],
            y=[labels[row["name"], row["kind"]] for row in marks],
            mode="markers",
            name=_plain(anomaly),
            marker={"color": colour, "size": 10, "symbol": symbol},
            customdata=[[row["value"], row["usual"]] for row in marks],
            hovertemplate="step %{x}: %{customdata[0]:.4g}, usual %{customdata[1]:.4g}<extra>%{y}</extra>",
        )
    _explain_if(figure, not found, "no anomaly was found")
    order = [labels[key] for key in shown]
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order, automargin=True)
    return figure.update_layout(xaxis_title="step", height=max(240, 140 + 22 * len(shown)), showlegend=True)


def _explain_if(figure: "go.Figure", empty: bool, text: str) -> None:
    """Write the reason into an empty figure."""
    if empty:
        figure.add_annotation(text=text, showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)


def _plain(text: str) -> str:
    """Return a text without markup and control characters, so that plotly shows it verbatim."""
    return escape(text_of(text))


def figure_widget(traces: list[dict[str, Any]], layout: dict[str, Any]) -> "go.FigureWidget":
    """Return a figure that stays connected to a notebook, with these traces and this layout over the usual one.

    Raises SetupError where anywidget is not installed."""
    figure = _figure()
    figure.add_traces(traces)
    figure.update_layout(**layout)
    try:
        import plotly.graph_objects as go

        widget = type("LiveFigure", (Unsaved, go.FigureWidget), {})(figure)
    except ImportError as error:
        raise SetupError("the explorer needs anywidget; install it with: pip install 'dshistory[notebook]'") from error
    # Plotly has no public way to set this for a widget. A double click undoes a zoom, as the buttons would, which cover
    # what is at the top.
    widget._config = {"responsive": True, "displayModeBar": False}
    return widget


def grid_axis() -> dict[str, Any]:
    """Return the options of an axis with the usual lines."""
    return {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.4)"}


def _dashes() -> Iterator[str]:
    """Yield a dash for each line; it changes when the colours repeat, so that no two lines look the same."""
    return (dash for dash in cycle(("solid", "dash", "dot")) for _ in _COLOURS)


def _label(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    several = len({other["kind"] for other in rows}) > 1
    return _plain(f"{row['name']} ({row['kind']})" if several else row["name"])


def _figure() -> "go.Figure":
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise SetupError("plots need plotly; install it with: pip install 'dshistory[notebook]'") from error
    return type("Figure", (ShownFigure, go.Figure), {})(
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": INK},
            "xaxis": grid_axis(),
            "yaxis": grid_axis(),
            "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        }
    )


def _of_run(table: "Table", run: str) -> pa.Table:
    data = table.to_arrow()
    return data.filter(pc.equal(data["run"], run))
