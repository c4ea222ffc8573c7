"""The view of the explorer: each `show_` method queries the history and draws one part of the view.

All of them run in the worker's thread and draw what `state` says when they begin, so a part never shows an outdated
choice. `code` and `table` belong to the last gesture, also when it is shown again because the history has grown.
"""

from collections.abc import Sequence
from glob import escape
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from catalog.errors import NotFoundError
from dshistory.display.scale import drawn_name
from dshistory.display.table import Table
from dshistory.patterns import Patterns
from dshistory.trends.layers_table import LayersTable
from dshistory.widgets import drawing
from dshistory.widgets.controls import PAGE_ROWS, Controls, pattern_text
from dshistory.widgets.gesture import Gesture
from dshistory.widgets.runs_view import RunsView
from dshistory.widgets.timeline_data import Timeline, anomalies_by_step, metric_query, read_timeline
from dshistory.widgets.view_state import OWN_PAST, Part, ViewState

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.options import Ref

__all__ = ["View"]

_FIRST_METRICS: Final = ("loss",)


class View:
    """The tables that are shown, and the controls that show them; a gesture replaces `state`."""

    def __init__(self, explorer: "Explorer", controls: Controls, state: ViewState, *, run: str | None) -> None:
        self.explorer, self.controls, self.state = explorer, controls, state
        self._run = run
        self.timeline = Timeline(run, [], [], [])
        self.curve = Table(pa.table({"step": pa.array([], pa.int64()), "value": pa.array([], pa.float64())}))
        self.timeline_metric = "loss"
        self.heat: LayersTable | None = None
        self.code = ""
        self.table: Table | None = None
        self._diff: Table | None = None
        self._diff_call = Gesture("diff")
        self._opened: tuple[tuple[str, int], Patterns, str, Patterns] | None = None
        self._drawn: dict[Part, str] = {}
        self._magnitudes_of: tuple[str, Patterns] | None = None
        self._notes: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self.runs = RunsView(self, controls.runs)

    @property
    def steps(self) -> Sequence[int]:
        """The steps of the checkpoints, ascending."""
        return [ref.step for ref in self.timeline.refs]

    def show_timeline(self) -> None:
        """Show the metric of the training with the checkpoints below it, and update the options of the controls."""
        state = self.state
        self._read_timeline(state)
        assert self.timeline.run is not None
        query, params = metric_query(self.explorer.history, self.timeline.run, state.timeline)
        self.curve = self.call(state, "timeline", Gesture("sql", (query,), dict(params)))
        self.timeline_metric = state.timeline
        drawing.draw_timeline(self.controls.figure, self.curve, self.steps, name=state.timeline)
        self.set_message("timeline", "")

    def show_layers(self) -> None:
        """Show the heat map."""
        state = self.state
        if not self._has_checkpoints(state):
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
        call = Gesture("layers", _unless_all(state.names), options)
        call = call.then("against_past") if state.colour == OWN_PAST else call
        against = f" {state.colour}" if state.colour == OWN_PAST else ""
        title = f"{drawn_name(state.metric)}{against}, {pattern_text(state.kinds)}{_only(state.names)}"
        if self._drawn.get("layers") != call.code:
            drawing.announce(self.controls.figure, {"heat": title})
        try:
            self.heat = self.call(state, "layers", call)
        except Exception:
            drawing.draw_heat(self.controls.figure, None, title=title)
            raise
        drawing.draw_heat(self.controls.figure, self.heat, title=title)
        shown = [s for s in self.steps if (state.first or s) <= s <= (s if state.last is None else state.last)]
        drawing.draw_range(self.controls.figure, shown)
        self.set_message("layers", self.heat.note)

    def show_anomalies(self) -> None:
        """Mark the anomalies on the timeline."""
        if self._has_checkpoints(self.state):
            found = Gesture("anomalies", (), {"run": self._run}).run(self.explorer)
            drawing.draw_anomalies(self.controls.figure, anomalies_by_step(found.details))
        self.set_message("anomalies", "")

    def show_detail(self) -> None:
        """Show one tensor over the steps: its trajectory and the magnitudes of its elements."""
        state, figure = self.state, self.controls.figure
        if state.picked is None:
            return
        try:
            name, kinds = self._tensor(state)
            kind = self._show_trajectory(state, name, kinds)
        except Exception:
            self._magnitudes_of = None
            drawing.draw_detail(figure, None, title="", metric=state.metric, logarithmic=False)
            raise
        elements, title = None, f"magnitudes of the elements of {name} ({kind})"
        try:
            elements = Gesture("histogram", (name,), {"state": kind, "run": self._run}).run(self.explorer)
        finally:
            drawing.draw_histogram(figure, elements, title=title)
        self._magnitudes_of = (name, kinds)
        self.set_message("detail", "")

    def show_diff(self) -> None:
        """Show the diff of two checkpoints as a table."""
        state = self.state
        if state.compared is None:
            return
        a, b = state.compared
        self._diff = None
        self._diff_call = Gesture("diff", (self._ref(a), self._ref(b)), {"kinds": state.kinds, "names": state.names})
        self.controls.show_picked(a, b)
        self.controls.show_diff(None, 0, f"{self._diff_call.code} …", None)
        try:
            self._diff = self.call(state, "diff", self._diff_call)
        except Exception:
            self.show_rows()
            raise
        self.show_rows()
        self.set_message("diff", "")

    def show_rows(self) -> None:
        """Show the chosen page of the diff in the chosen order; no query."""
        state = self.state
        if self._diff is None:
            self.controls.show_diff(None, 0, "", None)
            return
        call = self._diff_call
        if state.order is not None:
            column, descending = state.order
            call = call.then("sort", *((column,) if descending is None else state.order))
        rows = call.finish(self._diff)
        if state.gesture == "diff":
            self.set_code(call.code, rows)
        order = None if state.order is None else (state.order[0], self.descends(state.order))
        self.controls.show_diff(rows, min(state.page, self.last_page), call.code, order)

    def show_error(self, topic: str, error: Exception) -> None:
        """Show the first line of an error until its topic succeeds."""
        lines = str(error).split("\n")
        self._errors.pop(topic, None)
        self._errors[topic] = f"{topic}: {lines[0] or type(error).__name__}"
        self._show_status()

    def descends(self, order: tuple[str, bool | None]) -> bool:
        """Return whether the rows of the diff descend by this order."""
        column, descending = order
        return (self._diff is not None and not self._diff.is_text(column)) if descending is None else descending

    @property
    def last_page(self) -> int:
        """The last page of the diff's rows, from 0."""
        return 0 if self._diff is None else max(0, (len(self._diff) - 1) // PAGE_ROWS)

    def before(self, step: int) -> int | None:
        """Return the step of the checkpoint before that at `step`; None where there is none."""
        earlier = [known for known in self.steps if known < step]
        return earlier[-1] if earlier else None

    def _read_timeline(self, state: ViewState) -> None:
        self.timeline = timeline = read_timeline(self.explorer.history, self._run)
        self.controls.show_steps(self.steps, first=state.first, last=state.last)
        self.controls.offer(self.controls.timeline, [*_FIRST_METRICS, *timeline.metrics], state.timeline)
        self.controls.offer(self.controls.kind, timeline.kinds, pattern_text(state.kinds))
        if timeline.run is None or not timeline.refs:
            where = "no run" if timeline.run is None else f"no checkpoint of run {timeline.run}"
            raise NotFoundError(f"{where} in {self.explorer.root} yet; h.watch() shows them as they come")

    def _has_checkpoints(self, state: ViewState) -> bool:
        # A gesture may come before the first picture: then it is the gesture that reads what there is.
        if not self.timeline.refs and "timeline" not in self._errors:
            self._read_timeline(state)
        return bool(self.timeline.refs)

    def _show_trajectory(self, state: ViewState, name: str, kinds: Patterns) -> str:
        """Show the trajectory of a tensor, and return its kind."""
        assert state.picked is not None
        figure, what = self.controls.figure, drawn_name(state.metric)
        options = {"metric": state.metric, "kinds": kinds, "run": self._run}
        call = Gesture("trajectory", (escape(name),), options)
        if self._drawn.get("detail") == call.code:
            drawing.draw_picked(figure, state.picked[1])
        else:
            titles = {"detail": f"{what} of {name}"}
            if self._magnitudes_of != (name, kinds):
                titles["histogram"] = f"magnitudes of the elements of {name}"
            drawing.announce(figure, titles, step=state.picked[1])
        table = self.call(state, "detail", call)
        kind: str = table[0]["kind"]
        logarithmic = self.heat is not None and self.heat.picture().scale.logarithmic
        title = f"{what} of {name} ({kind})"
        drawing.draw_detail(figure, table, title=title, metric=state.metric, logarithmic=logarithmic)
        return kind

    def call(self, state: ViewState, part: Part, call: Gesture) -> Any:
        """Run the call and return its result; of the last gesture, if that was about `part`, its line is shown."""
        # Refreshing shows every part again: only that of the last gesture may set the code and the table.
        if state.gesture == part:
            self.set_code(call.code, None)
        self._drawn.pop(part, None)
        table = call.run(self.explorer)
        self._drawn[part] = call.code
        if state.gesture == part:
            self.table = table
        return table

    def set_code(self, code: str, table: Table | None) -> None:
        """Show the line of the last gesture; `table` is its result."""
        self.code, self.table = code, table
        self.controls.code.value = code

    def set_message(self, topic: str, text: str) -> None:
        """Note that a part is shown, with what is to be said about it."""
        self._errors.pop(topic, None)
        self._notes.pop(topic, None)
        if text:
            self._notes[topic] = text
        self._show_status()

    def _show_status(self) -> None:
        """Show the error of the last gesture, else another one, else the newest note."""
        newest = [*self._notes.values(), *self._errors.values(), self._errors.get(self.state.gesture)]
        self.controls.show_status(next((text for text in reversed(newest) if text), ""))

    def _tensor(self, state: ViewState) -> tuple[str, Patterns]:
        """Return the tensor to open, with its kind: that which is open, where only the kind has changed and the kind
        has it."""
        assert state.picked is not None
        opened = self._opened
        if opened is not None and opened[:2] == (state.picked, state.kinds):
            return opened[2:]
        if opened is not None and opened[0] == state.picked and self._exists(opened[2], state.kinds):
            name, kinds = opened[2], state.kinds
        else:
            name, kinds = self._tensor_at(*state.picked, state.kinds)
        self._opened = (state.picked, state.kinds, name, kinds)
        return name, kinds

    def _exists(self, name: str, kinds: Patterns) -> bool:
        try:
            self.explorer.layers(escape(name), metric="norm", kinds=kinds, run=self._run, quiet=True)
        except NotFoundError:
            return False
        return True

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


def _only(names: Patterns) -> str:
    return "" if names == "*" else f", {pattern_text(names)}"
