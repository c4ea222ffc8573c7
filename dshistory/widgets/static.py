"""The explorer where no kernel runs: a heat map made of a plain table, for nbconvert and GitHub, and one of letters for terminals.

Each cell has its number in it, so that where styles are stripped a readable table is left over.
"""

from html import escape
from typing import Final

from dshistory.display import html
from dshistory.display.formats import text_of
from dshistory.widgets.scale import Scale
from dshistory.widgets.view import Scene

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


def page(scene: Scene, *, status: str) -> str:
    """The timeline and the heat map as HTML, thinned to what fits on a page."""
    parts = [html.title_html(_title(scene))]
    if scene.heat is not None and len(scene.heat):
        parts.append(_heat_html(scene))
    parts += [f'<p class="dsh-note">{escape(line)}</p>' for line in (status,) if line]
    if scene.code:
        parts.append(f"<pre><code>{escape(scene.code)}</code></pre>")
    return html.document(*parts)


def text(scene: Scene, *, status: str) -> str:
    """The same in letters: a line for each layer, low to high."""
    lines = [_title(scene)]
    if scene.heat is not None and len(scene.heat):
        steps, labels, values = _thinned(scene, _MOST_LETTERS)
        scale = Scale(values)
        width = max(len(label) for label in labels)
        lines += [
            f"{label:<{width}}  {''.join(_bar(value, scale) for value in line)}"
            for label, line in zip(labels, values, strict=True)
        ]
        lines.append(
            f"{scene.heat.metric}, steps {steps[0]} to {steps[-1]}: {_BARS[0]} {text_of(scale.least)}, {_BARS[-1]} {text_of(scale.most)}, · unknown"
        )
    return "\n".join([*lines, *(line for line in (status, scene.code) if line)])


def _title(scene: Scene) -> str:
    return f"explorer of {scene.explorer.root}"


def _heat_html(scene: Scene) -> str:
    assert scene.heat is not None
    steps, labels, values = _thinned(scene, _MOST_COLUMNS)
    scale = Scale(values)
    curve = {row["step"]: row["value"] for row in scene.curve}
    head = "".join(f'<th style="text-align:right">{step}</th>' for step in steps)
    metric = "".join(f'<td style="text-align:right">{escape(text_of(curve.get(step)))}</td>' for step in steps)
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(text_of(label))}</th>{"".join(_cell(v, scale) for v in line)}</tr>'
        for label, line in zip(labels, values, strict=True)
    )
    left_out = len(scene.heat.labels()) - len(labels)
    more = f'<p class="dsh-note">… {left_out} more layers …</p>' if left_out else ""
    name = escape(text_of(scene.timeline))
    return (
        f'<table><thead><tr><th style="text-align:left">{escape(scene.heat.metric)} at step</th>{head}</tr></thead>'
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


def _thinned(scene: Scene, most_columns: int) -> Grid:
    """Steps evenly spread, the first and the last among them, and the first layers."""
    assert scene.heat is not None
    steps, _, values = scene.heat.grid()
    count = min(len(steps), most_columns)
    chosen = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    lines = [[line[i] for i in chosen] for line in values[:_MOST_LINES]]
    return [steps[i] for i in chosen], scene.heat.labels()[:_MOST_LINES], lines
