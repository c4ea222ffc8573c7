"""The controls of the explorer and their layout, without behaviour: `exploration` connects them.

Every control has a CSS class `dsh-...`, by which pages and tests find it.
"""

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import ipywidgets as w

from dshistory.display import html
from dshistory.display.table import Table
from dshistory.display.unsaved import Unsaved
from dshistory.patterns import Patterns
from dshistory.trends.trajectory import METRICS
from dshistory.widgets import panels
from dshistory.widgets.page_parts import ResizeNotifier, SortableRows
from dshistory.widgets.runs_controls import RunsControls
from dshistory.widgets.view_state import COLOURS

__all__ = ["PAGE_ROWS", "Controls", "pattern_text", "patterns_in"]

PAGE_ROWS: Final = 12
_NONE: Final = [("–", None)]
"""The only option where there is nothing to choose: a selection cannot be empty."""


def pattern_text(patterns: Patterns) -> str:
    """Return patterns as the text of a field, separated by commas."""
    return patterns if isinstance(patterns, str) else ", ".join(patterns)


def patterns_in(text: str) -> Patterns:
    """Return the patterns in the text of a field; '*' for an empty field."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return parts if len(parts) > 1 else parts[0] if parts else "*"


class _Root(Unsaved, w.VBox):  # type: ignore[misc]
    """The widget that holds all others."""


class Controls:
    """The ipywidgets; `root` holds all of them."""

    def __init__(self, *, names: Patterns, kinds: Patterns) -> None:
        self.range = w.SelectionRangeSlider(options=_NONE, index=(0, 0), description="steps", continuous_update=False)
        self.timeline = w.Dropdown(options=["loss"], value="loss", description="timeline")
        self.metric = w.Dropdown(options=METRICS, value="relative_update", description="metric")
        self.kind = w.Dropdown(options=[pattern_text(kinds)], value=pattern_text(kinds), description="kind")
        self.colour = w.Dropdown(options=COLOURS, value=COLOURS[0], description="colour")
        self.filter = w.Text(
            value=pattern_text(names), description="tensors", placeholder="*.mlp.*", continuous_update=False
        )
        self.figure = panels.make_figure()
        self._resize = ResizeNotifier()
        self.code = w.Textarea(value="", rows=1)
        self.step_a = w.Dropdown(options=_NONE, description="diff from")
        self.step_b = w.Dropdown(options=_NONE, description="to")
        self.diff_button = w.Button(description="diff", icon="exchange")
        self.diff = SortableRows()
        self.previous = w.Button(description="‹", tooltip="previous rows")
        self.next = w.Button(description="›", tooltip="next rows")
        self.pages = w.HBox([self.previous, self.next])
        pictures = w.Dropdown(options=["loss"], value="loss", description="picture")
        self.runs = RunsControls(picture=pictures, comparison=w.HTML(), root=w.VBox())
        self.status = w.HTML()
        self.progress = w.FloatProgress(value=0.0, min=0.0, max=1.0)
        self.root = self._layout()

    def show_status(self, text: str) -> None:
        """Show one line of text under the controls; markup in it is escaped."""
        self.status.value = f'<span style="white-space:pre-wrap">{escape(text)}</span>'

    def show_progress(self, share: float | None) -> None:
        """Show the share that is done, from 0 to 1; None hides the bar."""
        if share is None:
            self.progress.layout.visibility = "hidden"
        elif share == 1.0 or not 0 <= share - self.progress.value < 0.01:
            self.progress.value = share
            self.progress.layout.visibility = "visible"

    def show_steps(self, steps: Sequence[int], *, first: int | None, last: int | None) -> None:
        """Offer these steps.

        The slider is set from `first` to `last` (None: the ends). The two pickers are on the last step and the one
        before it, and follow them while they are on them; they keep any other step."""
        choices = [(str(step), step) for step in steps] or _NONE
        chosen = [
            i for i, step in enumerate(steps) if (first is None or step >= first) and (last is None or step <= last)
        ]
        with self.range.hold_sync():
            self.range.options = choices
            ends = (chosen[0], chosen[-1]) if chosen else (0, len(choices) - 1)
            self.range.index = ends
            # The slider derives its value from a *changed* index only, but the same index may now mean another step.
            self.range.value = (choices[ends[0]][1], choices[ends[1]][1])
        for picker, default in ((self.step_a, -2), (self.step_b, -1)):
            follows = picker.index == max(0, len(picker.options) + default)
            value = picker.value if picker.value in steps and not follows else choices[max(default, -len(choices))][1]
            with picker.hold_sync():
                picker.options = choices
                picker.value = value

    def offer(self, choice: Any, options: Sequence[str], value: str) -> None:
        """Give a dropdown these options and select `value`, which is added where it is missing."""
        wanted = list(dict.fromkeys([*options, value]))
        if (wanted, value) != (list(choice.options), choice.value):
            with choice.hold_sync():
                choice.options = wanted
                choice.value = value

    def show_picked(self, a: object, b: object) -> None:
        """Set the two pickers to these checkpoints, where they are steps on offer."""
        for picker, step in ((self.step_a, a), (self.step_b, b)):
            if any(step == value for _, value in picker.options):
                picker.value = step

    def show_diff(self, table: Table | None, page: int, title: str, order: tuple[str, bool] | None) -> None:
        """Show a page of a table, counted from 0, with buttons to the others; None shows the title alone.

        `order` is the column that the rows are sorted by, and whether it descends."""
        heading = html.title_html(title) if title else ""
        if table is None:
            self.diff.value, self.pages.layout.display = html.document(heading) if heading else "", "none"
            return
        first = page * PAGE_ROWS
        rows = table[first : first + PAGE_ROWS]
        where = f"rows {first + 1} to {first + len(rows)} of {len(table)}" if len(table) > PAGE_ROWS else ""
        note = "; ".join(text for text in (where, table.note, "click a head to sort") if text)
        marked = {} if order is None else {order[0]: f"{order[0]} {'▼' if order[1] else '▲'}"}
        data = rows.to_arrow().rename_columns([marked.get(name, name) for name in table.columns])
        formats = {marked.get(name, name): form for name, form in table.formats.items()}
        self.diff.value = html.document(heading, html.table_html(data, formats, note))
        self.pages.layout.display = "" if len(table) > PAGE_ROWS else "none"
        self.previous.disabled = page == 0
        self.next.disabled = first + PAGE_ROWS >= len(table)

    def disable(self) -> None:
        """Disable every control; what is shown stays."""
        for piece in self._interactive():
            piece.disabled = True

    def close(self) -> None:
        """Remove everything from the page and from the kernel's memory."""
        for piece in (
            *self._interactive(),
            self.figure,
            self._resize,
            self.code,
            self.diff,
            self.pages,
            self.status,
            self.progress,
            *self.runs.pieces(),
        ):
            piece.close()
        self.root.close()

    def _interactive(self) -> tuple[Any, ...]:
        return (
            *(self.range, self.timeline, self.metric, self.kind, self.colour, self.filter, self.step_a, self.step_b),
            *(self.diff_button, self.previous, self.next, self.runs.picture),
        )

    def _layout(self) -> Any:
        classes = {
            "range": self.range,
            "timeline": self.timeline,
            "metric": self.metric,
            "kind": self.kind,
            "colour": self.colour,
            "filter": self.filter,
            "figure": self.figure,
            "code": self.code,
            "step-a": self.step_a,
            "step-b": self.step_b,
            "diff-button": self.diff_button,
            "diff": self.diff,
            "diff-previous": self.previous,
            "diff-next": self.next,
            "status": self.status,
            "progress": self.progress,
        }
        for name, piece in classes.items():
            piece.add_class(f"dsh-{name}")
        self.pages.layout.display = "none"
        self.progress.layout.visibility = "hidden"
        self.range.layout.width = "98%"
        self.code.layout = w.Layout(width="98%", height="2.6em")
        for choice in (self.timeline, self.metric, self.kind, self.colour, self.filter, self.step_a, self.step_b):
            choice.layout.width = "230px"
            choice.style.description_width = "70px"
        root = _Root(
            [
                w.HBox(
                    [self.timeline, self.metric, self.kind, self.colour, self.filter],
                    layout=w.Layout(flex_flow="row wrap"),
                ),
                self.range,
                self._resize,
                self.figure,
                self.code,
                w.HBox([self.status, self.progress], layout=w.Layout(justify_content="space-between")),
                w.HBox([self.step_a, self.step_b, self.diff_button], layout=w.Layout(flex_flow="row wrap")),
                self.diff,
                self.pages,
                self.runs.root,
            ]
        )
        root.add_class("dsh-explorer")
        return root
