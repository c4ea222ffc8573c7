"""The explorer widget: gestures, in the browser or from Python, change the state of the view; a worker shows it.

gesture -> ViewState -> tasks of the worker, newest first -> calls of the explorer -> traits of the widgets

Only the worker's thread changes the controls, so a callback that runs in it is the worker's own change and never a
gesture. Callbacks hold the exploration weakly: one that was never shown ends with its last reference.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING, Any, Final

from catalog.errors import NotFoundError
from catalog.nearest_names import nearest
from dshistory.display.table import Table
from dshistory.options import DIFF_METRICS
from dshistory.patterns import Patterns
from dshistory.widgets import static
from dshistory.widgets.controls import Controls, pattern_text, patterns_in
from dshistory.widgets.view import View
from dshistory.widgets.view_state import Part, ViewState
from dshistory.widgets.watching import Watcher
from dshistory.widgets.worker import Worker

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.options import Ref

__all__ = ["Exploration"]

_PATIENCE_S: Final = 10.0
"""The widget is displayed after so many seconds at most, with or without its first picture."""

_OF_TENSORS: Final[tuple[Part, ...]] = ("layers", "detail", "diff")
"""The parts that show the tensors chosen by name and kind."""

_DIFF_COLUMNS: Final = ("name", "kind", "shape", "status", *DIFF_METRICS, "bound")


class Exploration:
    """One widget over one history, for one run and its parents.

    Setting a property is a gesture, as if it were made in the browser: it returns at once, `wait` waits until it is
    shown, and `status` tells what failed. `code` is the line of Python that reproduces the last gesture on a history
    named h, and `table` is the result of that line, or what its figure is drawn from, None until it is there. `figure`
    is the plotly FigureWidget.
    """

    def __init__(
        self, explorer: "Explorer", *, names: Patterns, kinds: Patterns, run: str | None, seconds: float | None
    ) -> None:
        self._controls = Controls(names=names, kinds=kinds)
        self._view = View(explorer, self._controls, ViewState(names, kinds), run=run)
        self._worker = Worker(on_error=self._view.show_error, progress=self._controls.show_progress)
        weakref.finalize(self, self._worker.abandon)
        weakref.finalize(self, self._controls.close).atexit = False
        self._watcher: Watcher | None = None
        if seconds is not None:
            self._watcher = Watcher(explorer.history, run, self.refresh, seconds=seconds)
            weakref.finalize(self, self._watcher.abandon)
        self._listen()
        self.refresh()
        if self._watcher is not None:
            self._watcher.start()

    @property
    def figure(self) -> Any:
        """The plotly FigureWidget: traces metric, checkpoints, anomalies, heat, detail, histogram."""
        return self._controls.figure

    @property
    def widget(self) -> Any:
        """The ipywidget that holds all of it."""
        return self._controls.root

    @property
    def code(self) -> str:
        """The line of Python that reproduces the last gesture."""
        return self._view.code

    @property
    def table(self) -> Table | None:
        """The result of that line; None before it is there, and where the call failed."""
        return self._view.table

    @property
    def status(self) -> str:
        """The text of the line under the figure."""
        text: str = self._controls.status.value
        return unescape(text.partition(">")[2].removesuffix("</span>"))

    @property
    def metric(self) -> str:
        """The metric of the heat map and the trajectory, one of those of `Explorer.layers`."""
        return self._view.state.metric

    @metric.setter
    def metric(self, metric: str) -> None:
        _choose(self._controls.metric, metric)

    @property
    def kind(self) -> str:
        """The kind of tensors, or patterns of kinds separated by commas."""
        return pattern_text(self._view.state.kinds)

    @kind.setter
    def kind(self, kind: str) -> None:
        self._show_first(_OF_TENSORS, "layers", kinds=patterns_in(kind), page=0)

    @property
    def colour(self) -> str:
        """The colours mean "absolute" values, or values "against its own past", of the same layer."""
        return self._view.state.colour

    @colour.setter
    def colour(self, colour: str) -> None:
        _choose(self._controls.colour, colour)

    @property
    def timeline(self) -> str:
        """The metric of the training that is shown above."""
        return self._view.state.timeline

    @timeline.setter
    def timeline(self, name: str) -> None:
        _choose(self._controls.timeline, name)

    @property
    def filter(self) -> str:
        """The patterns of tensor names, separated by commas."""
        return pattern_text(self._view.state.names)

    @filter.setter
    def filter(self, patterns: str) -> None:
        self._controls.filter.value = patterns

    @property
    def range(self) -> tuple[int, int] | None:
        """The first and last step shown; None when there is no checkpoint."""
        first, last = self._controls.range.value
        return None if first is None or last is None else (first, last)

    @range.setter
    def range(self, steps: tuple[int, int]) -> None:
        self.wait()
        known = self._view.steps
        inside = [i for i, step in enumerate(known) if steps[0] <= step <= steps[1]]
        if not inside:
            there = f"those there are go from {known[0]} to {known[-1]}" if known else "there is none yet"
            raise NotFoundError(f"no checkpoint from step {steps[0]} to {steps[1]}; {there}")
        self._controls.range.index = (inside[0], inside[-1])

    def select(self, layer: str, step: int) -> None:
        """Show the trajectory and the magnitudes of one tensor, as a click on a cell does: of the tensor that stands
        out in the layer at the step, or of the tensor of that name."""
        self._show_first(("detail",), "detail", picked=(layer, step))

    def pick(self, a: "Ref", b: "Ref") -> None:
        """Compare two checkpoints, as the button does with the two steps beside it."""
        self._show_first(("diff",), "diff", compared=(a, b), page=0)

    def sort(self, column: str, descending: bool | None = None) -> None:
        """Sort the rows of the diff, as a click on the head of a column does; a second click turns the order round.
        Text ascends by default, all else descends.

        Raises NotFoundError, with the nearest, for a column that the diff does not have."""
        if column not in _DIFF_COLUMNS:
            raise NotFoundError(f"no column {column!r}; {nearest(column, _DIFF_COLUMNS)}")
        order = self._view.state.order
        if descending is None and order is not None and order[0] == column:
            descending = not self._view.descends(order)
        self._show_first(("rows",), "diff", order=(column, descending), page=0)

    def compare(self, *runs: str) -> None:
        """Compare runs with the first of them, as clicks on their rows do one after the other; with fewer than two
        nothing is compared. The beginning of a name is enough.

        Raises NotFoundError, with those that exist, for a run that does not."""
        history = self._view.explorer.history
        self._choose_runs(tuple(dict.fromkeys(history.run_named(run) for run in runs)))

    @property
    def picture(self) -> str:
        """The picture of the compared runs shows a metric, or how far apart they are, as their "distance", or that of
        the "layers"."""
        return self._view.state.picture

    @picture.setter
    def picture(self, figure: str) -> None:
        self.wait()
        _choose(self._controls.runs.picture, figure)

    def refresh(self) -> None:
        """Query the history again: new checkpoints, metrics, statistics and runs appear."""
        self._worker.later(self._tasks(("timeline", "layers", "anomalies", "detail", "runs")))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all gestures are shown; False when the time is over first.

        Raises an unexpected error of a gesture; errors of the history are shown in `status` instead."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """End all threads and disable the controls; what is shown stays."""
        if self._watcher is not None:
            self._watcher.close()
        self._worker.close()
        self._controls.disable()
        self._controls.root.dsh_kept = None

    def __repr__(self) -> str:
        return static.text(self._view, status=self.status)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        self.wait(_PATIENCE_S)
        self._controls.root.dsh_kept = self  # a displayed widget lives as long as its controls are on the page
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._controls.root.model_id,
            },
            "text/html": static.page(self._view, status=self.status),
            "text/plain": repr(self),
        }

    def _listen(self) -> None:
        c = self._controls
        for piece, react in (
            (c.metric, self._on_metric),
            (c.kind, self._on_kind),
            (c.colour, self._on_colour),
            (c.filter, self._on_filter),
            (c.timeline, self._on_timeline),
            (c.range, self._on_range),
            (c.code, self._on_code),
            (c.runs.picture, self._on_picture),
        ):
            piece.observe(_weakly(react), "value")
        c.diff_button.on_click(_weakly(self._on_diff))
        c.previous.on_click(_weakly(self._on_previous))
        c.next.on_click(_weakly(self._on_next))
        c.diff.on_sort(_weakly(self._on_sort))
        c.runs.runs.on_row(_weakly(self._on_run))
        # The line takes the click on a mark that lies on it.
        clicked = {"heat": self._on_cell, "anomalies": self._on_anomaly, "metric": self._on_anomaly}
        for name, open_at in clicked.items():
            next(trace for trace in c.figure.data if trace.name == name).on_click(_weakly(open_at))

    def _show_first(self, parts: Sequence[Part], gesture: Part, **changed: Any) -> None:
        """Change the state by a gesture, and show the parts that depend on it before all others."""
        if not self._worker.is_me:
            self._view.state = replace(self._view.state, **changed, gesture=gesture)
            self._worker.first(self._tasks(parts))

    def _tasks(self, parts: Sequence[Part]) -> dict[str, Callable[[], None]]:
        view = self._view
        shows: dict[Part, Callable[[], None]] = {
            "timeline": view.show_timeline,
            "layers": view.show_layers,
            "anomalies": view.show_anomalies,
            "detail": view.show_detail,
            "diff": view.show_diff,
            "rows": view.show_rows,
            "runs": view.runs.show_runs,
            "comparison": view.runs.show_comparison,
            "picture": view.runs.show_picture,
        }
        return {part: shows[part] for part in parts}

    def _choose_runs(self, runs: tuple[str, ...]) -> None:
        self._show_first(("runs", "comparison"), "comparison" if len(runs) > 1 else "runs", runs=runs)

    def _on_run(self, row: int) -> None:
        listed = [] if self._view.runs.table is None else self._view.runs.table["run"].to_pylist()
        if 0 <= row < len(listed):
            run, chosen = listed[row], self._view.state.runs
            self._choose_runs(tuple(one for one in chosen if one != run) if run in chosen else (*chosen, run))

    def _on_picture(self, change: Any) -> None:
        self._show_first(("picture",), "comparison", picture=change["new"])

    def _on_metric(self, change: Any) -> None:
        self._show_first(("layers", "detail"), "layers", metric=change["new"])

    def _on_kind(self, change: Any) -> None:
        self._show_first(_OF_TENSORS, "layers", kinds=patterns_in(change["new"]), page=0)

    def _on_filter(self, change: Any) -> None:
        self._show_first(_OF_TENSORS, "layers", names=patterns_in(change["new"]), page=0)

    def _on_colour(self, change: Any) -> None:
        self._show_first(("layers",), "layers", colour=change["new"])

    def _on_range(self, change: Any) -> None:
        steps = self._view.steps
        first, last = change["new"]
        if steps:
            ends = {"first": None if first == steps[0] else first, "last": None if last == steps[-1] else last}
            self._show_first(("layers",), "layers", **ends)

    def _on_timeline(self, change: Any) -> None:
        self._show_first(("timeline",), "timeline", timeline=change["new"])

    def _on_code(self, change: Any) -> None:
        if not self._worker.is_me:
            self._controls.code.value = self._view.code  # the line is for copying, not for editing

    def _on_cell(self, trace: Any, points: Any, state: Any) -> None:
        if points.xs:
            self.select(unescape(str(points.ys[0])), int(points.xs[0]))

    def _on_anomaly(self, trace: Any, points: Any, state: Any) -> None:
        marked = next(trace.x for trace in self.figure.data if trace.name == "anomalies") or ()
        if points.xs and points.xs[0] in marked:
            step = int(points.xs[0])
            before = self._view.before(step)
            self.pick(step if before is None else before, step)

    def _on_sort(self, column: int) -> None:
        if 0 <= column < len(_DIFF_COLUMNS):
            self.sort(_DIFF_COLUMNS[column])

    def _on_diff(self, button: Any) -> None:
        a, b = self._controls.step_a.value, self._controls.step_b.value
        if a is not None and b is not None:
            self.pick(a, b)

    def _on_previous(self, button: Any) -> None:
        self._turn_page(-1)

    def _on_next(self, button: Any) -> None:
        self._turn_page(1)

    def _turn_page(self, pages: int) -> None:
        state = self._view.state
        page = min(max(0, state.page + pages), self._view.last_page)
        self._show_first(("rows",), state.gesture, page=page)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return the bound method as a callback that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def callback(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return callback


def _choose(dropdown: Any, value: str) -> None:
    if value not in dropdown.options:
        raise NotFoundError(f"no {dropdown.description} {value!r}; {nearest(value, dropdown.options)}")
    dropdown.value = value
