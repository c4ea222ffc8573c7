"""The explorer where no kernel runs: an HTML table for nbconvert and GitHub, text for terminals.

Every cell contains its number, so the table stays readable where styles are stripped.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

from dshistory.display import html
from dshistory.display.formats import text_of
from dshistory.display.scale import Scale
from dshistory.widgets.view import View

__all__ = ["page", "text"]

_MOST_LINES: Final = 40
_MOST_COLUMNS: Final = 12
_MOST_LETTERS: Final = 60
_BARS: Final = "▁▂▃▄▅▆▇█"
_CIVIDIS: Final = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115),
    (138, 134, 120), (165, 156, 116), (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip

Grid = tuple[list[int], list[str], list[list[float | None]]]


def page(view: View, *, status: str) -> str:
    """Return the timeline and the heat map as HTML, thinned to fit on a page."""
    parts = [html.title_html(_title(view))]
    if view.heat is not None and len(view.heat):
        parts.append(_heat_html(view))
    parts += [f'<p class="dsh-note">{escape(line)}</p>' for line in (status,) if line]
    if view.code:
        parts.append(f"<pre><code>{escape(view.code)}</code></pre>")
    return html.document(*parts)


def text(view: View, *, status: str) -> str:
    """Return the same as text: a line of bars for each layer."""
    lines = [_title(view)]
    if view.heat is not None and len(view.heat):
        steps, labels, values = _thinned(view, _MOST_LETTERS)
        scale = Scale(values)
        width = max(len(label) for label in labels)
        lines += [
            f"{label:<{width}}  {''.join(_bar(value, scale) for value in line)}"
            for label, line in zip(labels, values, strict=True)
        ]
        lines.append(
            f"{view.heat.metric}, steps {steps[0]} to {steps[-1]}{_left_out(view, steps, labels)}: "
            f"{_BARS[0]} {text_of(scale.least)}, {_BARS[-1]} {text_of(scale.most)}, · unknown"
        )
    return "\n".join([*lines, *(line for line in (status, view.code) if line)])


def _title(view: View) -> str:
    return f"explorer of {view.explorer.root}"


def _heat_html(view: View) -> str:
    assert view.heat is not None
    steps, labels, values = _thinned(view, _MOST_COLUMNS)
    scale = Scale(values)
    curve = {row["step"]: row["value"] for row in view.curve}
    head = "".join(f'<th style="text-align:right">{step}</th>' for step in steps)
    metric = "".join(f'<td style="text-align:right">{escape(text_of(curve.get(step)))}</td>' for step in steps)
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(text_of(label))}</th>{"".join(_cell(v, scale) for v in line)}</tr>'
        for label, line in zip(labels, values, strict=True)
    )
    left_out = _left_out(view, steps, labels)
    more = f'<p class="dsh-note">{left_out.removeprefix("; ")}</p>' if left_out else ""
    name = escape(text_of(view.timeline_metric))
    return (
        f'<table><thead><tr><th style="text-align:left">{escape(view.heat.metric)} at step</th>{head}</tr></thead>'
        f'<tbody><tr><th style="text-align:left">{name}</th>{metric}</tr>{rows}</tbody></table>{more}'
    )


def _cell(value: float | None, scale: Scale) -> str:
    if value is None:
        return "<td></td>"
    red, green, blue = _colour(scale.share(value))
    ink = "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"
    style = f"text-align:right;background:#{red:02x}{green:02x}{blue:02x};color:{ink}"
    return f'<td style="{style}">{escape(text_of(value))}</td>'


def _colour(share: float) -> tuple[int, int, int]:
    place = share * (len(_CIVIDIS) - 1)
    below = min(int(place), len(_CIVIDIS) - 2)
    red, green, blue = (
        round(a + (b - a) * (place - below)) for a, b in zip(_CIVIDIS[below], _CIVIDIS[below + 1], strict=True)
    )
    return red, green, blue


def _bar(value: float | None, scale: Scale) -> str:
    if value is None:
        return "·"
    return _BARS[round(scale.share(value) * (len(_BARS) - 1))]


def _thinned(view: View, most_columns: int) -> Grid:
    """Return evenly spread steps, the first and the last among them, and the first layers."""
    assert view.heat is not None
    steps, _, values = view.heat.grid()
    count = min(len(steps), most_columns)
    chosen = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    lines = [[line[i] for i in chosen] for line in values[:_MOST_LINES]]
    return [steps[i] for i in chosen], view.heat.labels()[:_MOST_LINES], lines


def _left_out(view: View, steps: Sequence[int], labels: Sequence[str]) -> str:
    """Say how many of the checkpoints and layers are shown, where it is not all of them."""
    assert view.heat is not None
    all_steps, all_lines, _ = view.heat.grid()
    said = ""
    if len(steps) < len(all_steps):
        said += f"; {len(steps)} of {len(all_steps)} checkpoints, evenly spread"
    if len(labels) < len(all_lines):
        said += f"; the first {len(labels)} of {len(all_lines)} layers"
    return said
