"""What the explorer shows, and how it comes there: each method asks the history and draws what it says.

All of it runs in the worker's thread. `code` and `table` are those of the last gesture, also when it is shown again because the
history has grown.
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
from dshistory.widgets.controls import PAGE_ROWS, Controls, written
from dshistory.widgets.gesture import Gesture
from dshistory.widgets.timeline import Overview, anomalies_by_step, metric_query, overview

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.options import Ref

__all__ = ["Scene", "Wish"]

_FIRST_METRICS: Final = ("loss",)


@dataclass(frozen=True)
class Wish:
    """What is to be shown."""

    names: Patterns = "*"
    kinds: Patterns = "model"
    metric: str = "relative_update"
    timeline: str = "loss"
    first: int | None = None
    last: int | None = None
    picked: tuple[str, int] | None = None
    """A layer or a tensor, and a step."""
    gesture: str = "layers"
    """What was done last: timeline, layers, detail or diff."""


class Scene:
    """The tables that are shown, and the controls that show them."""

    def __init__(self, explorer: "Explorer", controls: Controls, *, run: str | None) -> None:
        self.explorer, self.controls = explorer, controls
        self._run = run
        self.overview = Overview(run, [], [], [])
        self.curve = Table(pa.table({"step": pa.array([], pa.int64()), "value": pa.array([], pa.float64())}))
        self.timeline = "loss"
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
        return [ref.step for ref in self.overview.refs]

    def show_timeline(self, wish: Wish) -> None:
        """The metric of the training, with the checkpoints; also what there is to choose from."""
        self.overview = seen = overview(self.explorer.history, self._run)
        self.controls.show_steps(self.steps, first=wish.first, last=wish.last)
        self.controls.offer(self.controls.timeline, [*_FIRST_METRICS, *seen.metrics], wish.timeline)
        self.controls.offer(self.controls.kind, seen.kinds, written(wish.kinds))
        if seen.run is None or not seen.refs:
            where = "no run" if seen.run is None else f"no checkpoint of run {seen.run}"
            raise NotFoundError(f"{where} in {self.explorer.root} yet; h.watch() shows them as they come")
        query, params = metric_query(self.explorer.history, seen.run, wish.timeline)
        self.curve = self._asked(wish, "timeline", Gesture("sql", (query,), dict(params)))
        self.timeline = wish.timeline
        drawing.draw_timeline(self.controls.figure, self.curve, self.steps, name=wish.timeline)
        self._said("timeline", "")

    def show_layers(self, wish: Wish) -> None:
        """The heat map, and again the tensor looked into, with the same metric."""
        if not self.overview.refs:
            return
        options = {"metric": wish.metric, "kinds": wish.kinds, "run": self._run, "first": wish.first, "last": wish.last}
        self.controls.offer(self.controls.kind, self.overview.kinds, written(wish.kinds))
        self.heat = None
        try:
            self.heat = self._asked(wish, "layers", Gesture("layers", _unless_all(wish.names), options))
        finally:
            drawing.draw_heat(self.controls.figure, self.heat)
            shown = [s for s in self.steps if (wish.first or s) <= s <= (s if wish.last is None else wish.last)]
            drawing.draw_range(self.controls.figure, shown)
        self._said("layers", self.heat.note if self.heat is not None else "")
        if wish.picked is not None:
            self.show_detail(wish)

    def show_anomalies(self) -> None:
        """Marks on the timeline."""
        if self.overview.refs:
            found = Gesture("anomalies", (), {"run": self._run}).run(self.explorer)
            drawing.draw_anomalies(self.controls.figure, anomalies_by_step(found))
        self._said("anomalies", "")

    def show_detail(self, wish: Wish) -> None:
        """One tensor over time: its trajectory, and how large its elements are."""
        assert wish.picked is not None
        if self._picked != wish.picked:
            self._tensor, self._picked = self._tensor_at(*wish.picked, wish.kinds), wish.picked
        assert self._tensor is not None
        name, kind = self._tensor
        drawing.draw_picked(self.controls.figure, wish.picked[1])
        options = {"metric": wish.metric, "kinds": kind, "run": self._run}
        table = self._asked(wish, "detail", Gesture("trajectory", (escape(name),), options))
        drawing.draw_detail(self.controls.figure, table, metric=wish.metric)
        self._said("trajectory", "")
        one_state = {"state": table[0]["kind"], "run": self._run}
        drawing.draw_histogram(self.controls.figure, None)
        drawing.draw_histogram(self.controls.figure, Gesture("histogram", (name,), one_state).run(self.explorer))

    def show_diff(self, wish: Wish, a: "Ref", b: "Ref") -> None:
        """Two checkpoints compared, as a table."""
        options = {"kinds": wish.kinds, "names": wish.names}
        self._diff, self._page = None, 0
        self.controls.show_picked(a, b)
        try:
            self._diff = self._asked(wish, "diff", Gesture("diff", (self._ref(a), self._ref(b)), options))
        finally:
            self.controls.show_diff(self._diff, 0)
        self._said("diff", "")

    def turn_page(self, pages: int) -> None:
        """So many pages on in the table of the diff."""
        if self._diff is not None:
            self._page = min(max(0, self._page + pages), max(0, (len(self._diff) - 1) // PAGE_ROWS))
            self.controls.show_diff(self._diff, self._page)

    def show_error(self, topic: str, error: Exception) -> None:
        """What could not be done, as one line, until it can."""
        lines = str(error).split("\n")
        self._said(topic, f"{topic}: {lines[0] or type(error).__name__}")

    def _asked(self, wish: Wish, topic: str, call: Gesture) -> Any:
        last = wish.gesture == topic
        if last:
            self.table, self.code = None, call.code
            self.controls.code.value = self.code
        table = call.run(self.explorer)
        if last:
            self.table = table
        return table

    def _said(self, topic: str, text: str) -> None:
        self._messages.pop(topic, None)
        if text:
            self._messages[topic] = text
        self.controls.show_status(next(reversed(self._messages.values()), ""))

    def _tensor_at(self, name: str, step: int, kinds: Patterns) -> tuple[str, Patterns]:
        """The tensor of the layer that stands out at the step, with its kind; else the tensor of that name."""
        if self.heat is None:
            return name, kinds
        of_layer = list(self.heat.of(name))
        if not of_layer:
            return name, kinds
        at_step = [row for row in of_layer if row["step"] == step]
        known = [row for row in (*at_step, *reversed(of_layer)) if row["most"] is not None]
        if not known:
            raise NotFoundError(
                f"nothing is known of layer {name} in the steps shown: no statistics (`analyze` computes them), or nothing finite"
            )
        return known[0]["most"], escape(known[0]["kind"])

    def _ref(self, step: "Ref") -> "Ref":
        """As the line of code must name the checkpoint: steps of another run than the current one with their run."""
        if self._run is None or not isinstance(step, int):
            return step
        return next((str(ref) for ref in self.overview.refs if ref.step == step), f"{self._run}:{step}")


def _unless_all(names: Patterns) -> tuple[Patterns, ...]:
    return () if names == "*" else (names,)
