"""A figure as a small SVG, for where plotly.js is not: GitHub, and pages that nbconvert makes.

It draws what the figures of this package consist of: lines and marks, horizontal bars and heat maps, on axes of
numbers, of logarithms or of categories. A heat map is one image with a pixel for each cell.
"""

import base64
import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from typing import Any, Final

import numpy as np

__all__ = ["svg"]

_WIDTH: Final = 760
_TOP, _RIGHT, _BOTTOM = 14, 120, 46
_LETTER: Final = 6.3
_INK: Final = "#7a828c"
_MOST_LABELS: Final = 24


def svg(figure: Mapping[str, Any]) -> str:
    """Return the SVG of a figure, given as plotly's JSON (`to_plotly_json`)."""
    layout, traces = figure["layout"], figure["data"]
    x = _Axis(layout.get("xaxis", {}), _values(traces, "x"))
    y = _Axis(layout.get("yaxis", {}), _values(traces, "y"))
    height = int(layout.get("height", 400))
    left = 34 + _LETTER * max((len(_words(text)) for _, text in y.ticks()), default=0)
    cells = next((trace for trace in traces if trace.get("type") == "heatmap"), None)
    x.widen(len(_list(cells.get("x"))) if cells is not None else 0)
    y.widen(len(_list(cells.get("y"))) if cells is not None else 0)
    x.place(left, _WIDTH - _RIGHT)
    y.place(height - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">',
        *_axes(x, y, left, height),
        *(part for trace in traces for part in _trace(trace, x, y)),
        *_legend(traces),
        *(_text(_WIDTH / 2, height / 2, note.get("text", ""), "middle") for note in layout.get("annotations", ())),
    ]
    return "".join([*parts, "</svg>"])


class _Axis:
    """From values to places in the picture; `categories` is empty for an axis of numbers."""

    def __init__(self, options: Mapping[str, Any], values: Sequence[Any]) -> None:
        self.title = _words(options.get("title", {}).get("text", ""))
        self._logarithmic = options.get("type") == "log"
        is_text = options.get("type") == "category" or any(isinstance(value, str) for value in values)
        order = [*options.get("categoryarray", ()), *values]
        self.categories = list(dict.fromkeys(str(value) for value in order)) if is_text else []
        known = [place for value in values if (place := self._number(value)) is not None]
        self._low, self._high = min(known, default=0.0), max(known, default=1.0)
        if self._low == self._high:
            self._low, self._high = self._low - 0.5, self._high + 0.5
        self._reversed = options.get("autorange") == "reversed"
        self._from, self._to = 0.0, 1.0

    def place(self, begin: float, end: float) -> None:
        """Set where in the picture the axis begins and ends."""
        self._from, self._to = (end, begin) if self._reversed else (begin, end)

    def widen(self, cells: int) -> None:
        """Leave room at both ends: half a cell of a heat map, half a category, or a little."""
        count = cells or len(self.categories)
        share = 0.5 / (count - 1) if count > 1 else 0.03
        room = (self._high - self._low) * share
        self._low, self._high = self._low - room, self._high + room

    def __call__(self, value: Any) -> float | None:
        number = self._number(value)
        if number is None:
            return None
        return self._from + (number - self._low) / (self._high - self._low) * (self._to - self._from)

    def ticks(self) -> list[tuple[Any, str]]:
        """Return the values that get a label, with their labels, which are markup."""
        if self.categories:
            apart = -(-len(self.categories) // _MOST_LABELS)
            return [(name, name) for name in self.categories[::apart]]
        if self._logarithmic:
            powers = range(math.ceil(self._low), math.floor(self._high) + 1)
            return [(10.0**power, f"1e{power}") for power in powers]
        step = 10 ** math.floor(math.log10((self._high - self._low) / 2))
        step = next((step * by for by in (1, 2, 5, 10) if (self._high - self._low) / (step * by) <= 7), step)
        first = math.ceil(self._low / step)
        return [(at * step, f"{at * step:.4g}") for at in range(first, math.floor(self._high / step) + 1)]

    def _number(self, value: Any) -> float | None:
        if self.categories:
            return float(self.categories.index(str(value))) if str(value) in self.categories else None
        if value is None or not math.isfinite(value) or (self._logarithmic and value <= 0):
            return None
        return math.log10(value) if self._logarithmic else float(value)


def _values(traces: Iterable[Mapping[str, Any]], axis: str) -> list[Any]:
    values = [value for trace in traces for value in _list(trace.get(axis))]
    is_bar = any(trace.get("type") == "bar" for trace in traces)
    return [0.0, *values] if is_bar and axis == "x" else values


def _axes(x: _Axis, y: _Axis, left: float, height: int) -> Iterator[str]:
    bottom, right = height - _BOTTOM, _WIDTH - _RIGHT
    for value, label in x.ticks():
        at = x(value)
        yield f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="{_INK}" stroke-opacity=".25"/>'
        yield _text(at or 0.0, bottom + 15, label, "middle")
    for value, label in y.ticks():
        at = y(value)
        yield f'<path d="M{left} {at:.1f}H{right}" stroke="{_INK}" stroke-opacity=".25"/>'
        yield _text(left - 5, (at or 0.0) + 4, label, "end")
    yield _text((left + right) / 2, height - 12, x.title, "middle")
    yield f'<g transform="translate(11 {(_TOP + bottom) / 2}) rotate(-90)">{_text(0, 0, y.title, "middle")}</g>'


def _trace(trace: Mapping[str, Any], x: _Axis, y: _Axis) -> Iterator[str]:
    match trace.get("type"):
        case "heatmap":
            yield from _heat_map(trace, x, y)
        case "bar":
            for length, name in zip(_list(trace["x"]), _list(trace["y"]), strict=True):
                begin, end, at = x(0.0) or 0.0, x(length), y(name)
                if end is not None and at is not None:
                    place = f'x="{begin:.1f}" y="{at - 7:.1f}" width="{end - begin:.1f}" height="14"'
                    yield f'<rect {place} fill="{_colour(trace)}"/>'
        case _:
            yield from _scatter(trace, x, y)


def _scatter(trace: Mapping[str, Any], x: _Axis, y: _Axis) -> Iterator[str]:
    points = [(x(a), y(b)) for a, b in zip(_list(trace.get("x")), _list(trace.get("y")), strict=True)]
    colour = _colour(trace)
    if "lines" in trace.get("mode", "lines"):
        path, pen = [], "M"
        for a, b in points:
            if a is None or b is None:
                pen = "M"
            else:
                path.append(f"{pen}{a:.1f} {b:.1f}")
                pen = "L"
        yield f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    if "markers" in trace.get("mode", "lines"):
        yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points if a and b)


def _heat_map(trace: Mapping[str, Any], x: _Axis, y: _Axis) -> Iterator[str]:
    rows = [_list(row) for row in _list(trace.get("z"))]
    known = [value for row in rows for value in row if value is not None and math.isfinite(value)]
    if not known:
        return
    low, high = trace.get("zmin", min(known)), trace.get("zmax", max(known))
    scale = _colours(trace["colorscale"])
    span = high - low or 1.0
    pixels = [[None if v is None else _mixed(scale, (v - low) / span) for v in row] for row in rows]
    corners = [
        (axis(values[0]) or 0.0, axis(values[-1]) or 0.0)
        for axis, values in ((x, _list(trace["x"])), (y, _list(trace["y"])))
    ]
    (left, right), (first, last) = corners
    half_x = (right - left) / max(1, len(rows[0]) - 1) / 2 or 20.0
    half_y = (last - first) / max(1, len(rows) - 1) / 2 or 20.0
    if half_y < 0:
        pixels, first, last, half_y = pixels[::-1], last, first, -half_y
    picture = base64.b64encode(_png(pixels)).decode()
    yield (
        f'<image x="{left - half_x:.1f}" y="{first - half_y:.1f}" width="{right - left + 2 * half_x:.1f}" '
        f'height="{last - first + 2 * half_y:.1f}" preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{picture}"/>'
    )
    bar = trace.get("colorbar", {})
    ticks = zip(bar.get("tickvals") or (low, high), bar.get("ticktext") or (f"{low:.3g}", f"{high:.3g}"), strict=True)
    strip = base64.b64encode(_png([[_mixed(scale, 1 - i / 31)] for i in range(32)])).decode()
    begin, length = _WIDTH - _RIGHT + 24, max(60.0, last - first + 2 * half_y)
    yield (
        f'<image x="{begin}" y="{first - half_y:.1f}" width="10" height="{length:.1f}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{strip}"/>'
    )
    for value, label in ticks:
        yield _text(begin + 14, first - half_y + length * (high - value) / span + 4, label, "start")


def _legend(traces: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    named = [trace for trace in traces if trace.get("name") and trace.get("type") != "heatmap"]
    for line, trace in enumerate(named if len(named) > 1 else []):
        at = _TOP + 8 + 15 * line
        yield f'<circle cx="{_WIDTH - _RIGHT + 12}" cy="{at - 4}" r="4" fill="{_colour(trace)}"/>'
        name = _words(trace["name"])
        yield _text(_WIDTH - _RIGHT + 20, at, name if len(name) < 17 else f"…{name[-15:]}", "start")


def _colour(trace: Mapping[str, Any]) -> str:
    for part in ("line", "marker"):
        colour = trace.get(part, {}).get("color")
        if isinstance(colour, str):
            return colour
    return _INK


def _colours(scale: Iterable[Sequence[Any]]) -> list[tuple[float, tuple[int, int, int]]]:
    return [(float(share), (int(hue[1:3], 16), int(hue[3:5], 16), int(hue[5:7], 16))) for share, hue in scale]


def _mixed(scale: Sequence[tuple[float, tuple[int, int, int]]], share: float) -> tuple[int, int, int]:
    share = min(1.0, max(0.0, share))
    at = next((i for i in range(1, len(scale)) if share <= scale[i][0]), len(scale) - 1)
    (low, a), (high, b) = scale[at - 1], scale[at]
    part = (share - low) / (high - low)
    red, green, blue = (round(p + (q - p) * part) for p, q in zip(a, b, strict=True))
    return red, green, blue


def _png(rows: Sequence[Sequence[tuple[int, int, int] | None]]) -> bytes:
    """Encode pixels as a PNG; None is transparent."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = [b"\0" + b"".join(bytes((*pixel, 255)) if pixel else b"\0\0\0\0" for pixel in row) for row in rows]
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(lines))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(_words(label))}</text>'


def _words(markup: str) -> str:
    """Return plotly's markup as plain text: a raised number after a sign of power."""
    return unescape(re.sub(r"<[^>]*>", "", re.sub(r"<sup>(.*?)</sup>", r"^\1", markup)))


def _list(values: Any) -> list[Any]:
    """Return values that plotly may keep as a NumPy array, or as one that is encoded already."""
    if isinstance(values, Mapping):
        array = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        values = array.reshape([int(size) for size in str(values.get("shape", len(array))).split(",")])
    return [] if values is None else list(values.tolist() if hasattr(values, "tolist") else values)
