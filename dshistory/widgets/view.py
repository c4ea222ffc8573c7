"""The view of the explorer: each `show_` method queries the history and draws the result.

All of them run in the worker's thread. `code` and `table` belong to the last gesture, also when it is shown again
because the history has grown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from dshistory.display.table import Table
from dshistory.patterns import Patterns
from dshistory.trends.layers import LayersTable
from dshistory.widgets import drawing
from dshistory.widgets.controls import PAGE_ROWS, Controls, pattern_text
from dshistory.widgets.gesture import Gesture
from dshistory.widgets.timeline_data import Timeline, anomalies_by_step, metric_query, read_timeline

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.options import Ref

__all__ = ["View", "ViewState"]

_FIRST_METRICS: Final = ("loss",)


@dataclass(frozen=True)
class ViewState:
    """The selections of the widget; a gesture makes a new one."""

    names: Patterns = "*"
    kinds: Patterns = "model"
    metric: str = "relative_update"
    timeline: str = "loss"
    first: int | None = None
    last: int | None = None
    picked: tuple[str, int] | None = None
    """A layer or a tensor, and a step."""
    gesture: str = "layers"
    """The topic of the last gesture: timeline, layers, detail or diff."""


class View:
    """The tables that are shown, and the controls that show them."""

    def __init__(self, explorer: "Explorer", controls: Controls, *, run: str | None) -> None:
        self.explorer, self.controls = explorer, controls
        self._run = run
        self.timeline = Timeline(run, [], [], [])
        self.curve = Table(pa.table({"step": pa.array([], pa.int64()), "value": pa.array([], pa.float64())}))
        self.timeline_metric = "loss"
        self.heat: LayersTable | None = None
        self.code = ""
        self.table: Table | None = None
        self._diff: Table | None = None
        self._page = 0
        self._picked: tuple[str, int] | None = None
        self._tensor: tuple[str, Patterns] | None = None
        self._messages: dict[str, str] = {}

    @property
    def steps(self) -> Sequence[int]:
        """The steps of the checkpoints, ascending."""
        return [ref.step for ref in self.timeline.refs]

    def show_timeline(self, state: ViewState) -> None:
        """Show the metric of the training with the checkpoints on it, and update the options of the controls."""
        self.timeline = timeline = read_timeline(self.explorer.history, self._run)
        self.controls.show_steps(self.steps, first=state.first, last=state.last)
        self.controls.offer(self.controls.timeline, [*_FIRST_METRICS, *timeline.metrics], state.timeline)
        self.controls.offer(self.controls.kind, timeline.kinds, pattern_text(state.kinds))
        if timeline.run is None or not timeline.refs:
            where = "no run" if timeline.run is None else f"no checkpoint of run {timeline.run}"
            raise NotFoundError(f"{where} in {self.explorer.root} yet; h.watch() shows them as they come")
        query, params = metric_query(self.explorer.history, timeline.run, state.timeline)
        self.curve = self._call(state, "timeline", Gesture("sql", (query,), dict(params)))
        self.timeline_metric = state.timeline
        drawing.draw_timeline(self.controls.figure, self.curve, self.steps, name=state.timeline)
        self._set_message("timeline", "")

    def show_layers(self, state: ViewState) -> None:
        """Show the heat map, and the selected tensor, if any, with the same metric."""
        if not self.timeline.refs:
            return
        options = {
            "metric": state.metric,
            "kinds": state.kinds,
            "run": self._run,
            "first": state.first,
            "last": state.last,
        }
        self.controls.offer(self.controls.kind, self.timeline.kinds, pattern_text(state.kinds))
        self.heat = None
        try:
            self.heat = self._call(state, "layers", Gesture("layers", _unless_all(state.names), options))
        finally:
            drawing.draw_heat(self.controls.figure, self.heat)
            shown = [s for s in self.steps if (state.first or s) <= s <= (s if state.last is None else state.last)]
            drawing.draw_range(self.controls.figure, shown)
        self._set_message("layers", self.heat.note if self.heat is not None else "")
        if state.picked is not None:
            self.show_detail(state)

    def show_anomalies(self) -> None:
        """Mark the anomalies on the timeline."""
        if self.timeline.refs:
            found = Gesture("anomalies", (), {"run": self._run}).run(self.explorer)
            drawing.draw_anomalies(self.controls.figure, anomalies_by_step(found))
        self._set_message("anomalies", "")

    def show_detail(self, state: ViewState) -> None:
        """Show one tensor over the steps: its trajectory and the magnitudes of its elements."""
        assert state.picked is not None
        if self._picked != state.picked:
            self._tensor, self._picked = self._tensor_at(*state.picked, state.kinds), state.picked
        assert self._tensor is not None
        name, kind = self._tensor
        drawing.draw_picked(self.controls.figure, state.picked[1])
        options = {"metric": state.metric, "kinds": kind, "run": self._run}
        table = self._call(state, "detail", Gesture("trajectory", (escape(name),), options))
        drawing.draw_detail(self.controls.figure, table, metric=state.metric)
        self._set_message("trajectory", "")
        one_state = {"state": table[0]["kind"], "run": self._run}
        drawing.draw_histogram(self.controls.figure, None)
        drawing.draw_histogram(self.controls.figure, Gesture("histogram", (name,), one_state).run(self.explorer))

    def show_diff(self, state: ViewState, a: "Ref", b: "Ref") -> None:
        """Show the diff of two checkpoints as a table."""
        options = {"kinds": state.kinds, "names": state.names}
        self._diff, self._page = None, 0
        self.controls.show_picked(a, b)
        try:
            self._diff = self._call(state, "diff", Gesture("diff", (self._ref(a), self._ref(b)), options))
        finally:
            self.controls.show_diff(self._diff, 0)
        self._set_message("diff", "")

    def turn_page(self, pages: int) -> None:
        """Go on by so many pages in the table of the diff; back by a negative number."""
        if self._diff is not None:
            self._page = min(max(0, self._page + pages), max(0, (len(self._diff) - 1) // PAGE_ROWS))
            self.controls.show_diff(self._diff, self._page)

    def show_error(self, topic: str, error: Exception) -> None:
        """Show the first line of an error until its topic succeeds."""
        lines = str(error).split("\n")
        self._set_message(topic, f"{topic}: {lines[0] or type(error).__name__}")

    def _call(self, state: ViewState, topic: str, call: Gesture) -> Any:
        # Refreshing shows every topic again: only that of the last gesture may set the code and the table.
        last = state.gesture == topic
        if last:
            self.table, self.code = None, call.code
            self.controls.code.value = self.code
        table = call.run(self.explorer)
        if last:
            self.table = table
        return table

    def _set_message(self, topic: str, text: str) -> None:
        self._messages.pop(topic, None)
        if text:
            self._messages[topic] = text
        self.controls.show_status(next(reversed(self._messages.values()), ""))

    def _tensor_at(self, name: str, step: int, kinds: Patterns) -> tuple[str, Patterns]:
        """Return the tensor, with its kind, that stands out in the layer at the step; for another name, the tensor of
        that name."""
        if self.heat is None:
            return name, kinds
        of_layer = list(self.heat.of(name))
        if not of_layer:
            return name, kinds
        at_step = [row for row in of_layer if row["step"] == step]
        known = [row for row in (*at_step, *reversed(of_layer)) if row["most"] is not None]
        if not known:
            raise NotFoundError(
                f"nothing is known of layer {name} in the steps shown: no statistics (`analyze` computes them), "
                "or nothing finite"
            )
        return known[0]["most"], escape(known[0]["kind"])

    def _ref(self, step: "Ref") -> "Ref":
        """Return the checkpoint as the line of code must name it: a step of a chosen run together with its run."""
        if self._run is None or not isinstance(step, int):
            return step
        return next((str(ref) for ref in self.timeline.refs if ref.step == step), f"{self._run}:{step}")


def _unless_all(names: Patterns) -> tuple[Patterns, ...]:
    return () if names == "*" else (names,)
