"""The explorer as a person uses it: gestures, of the browser or of Python, become wishes; a worker shows them.

gesture -> wish -> task of the worker -> call of the explorer -> traits of the widgets

Only the worker's thread changes what is shown, so a change that it makes itself is never taken for a gesture. Callbacks hold the
exploration weakly: one that was never shown ends with its last reference.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING, Any, Final

from catalog.errors import NotFoundError
from dshistory.display.table import Table
from dshistory.patterns import Patterns, nearest
from dshistory.widgets import static
from dshistory.widgets.controls import Controls, patterns_in, written
from dshistory.widgets.view import Scene, Wish
from dshistory.widgets.watching import Watcher
from dshistory.widgets.worker import Worker

if TYPE_CHECKING:
    from dshistory.explorer import Explorer
    from dshistory.options import Ref

__all__ = ["Exploration"]

_PATIENCE_S: Final = 10.0
"""So long the first picture may take before the widget is shown without it."""


class Exploration:
    """One history in one widget, of one run and its parents. Every change of a property is a gesture, as if it were made in the
    browser: it returns at once, `wait` waits until it is shown, and what could not be done is said in `status`.

    `code` is the line of Python that reproduces the last gesture on a history called h, and `table` what it returned, None while it
    is not there. `figure` is the one plotly FigureWidget.
    """

    def __init__(
        self, explorer: "Explorer", *, names: Patterns, kinds: Patterns, run: str | None, seconds: float | None
    ) -> None:
        self._controls = Controls(names=names, kinds=kinds)
        self._scene = Scene(explorer, self._controls, run=run)
        self._worker = Worker(told=self._scene.show_error, progress=self._controls.show_progress)
        self._wish = Wish(names, kinds)
        weakref.finalize(self, self._worker.abandon)
        weakref.finalize(self, self._controls.close).atexit = False
        self._watcher: Watcher | None = None
        if seconds is not None:
            self._watcher = Watcher(explorer.history, run, self.refresh, seconds=seconds)
            weakref.finalize(self, self._watcher.abandon)
        self._listen()
        self._look()
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
        return self._scene.code

    @property
    def table(self) -> Table | None:
        """What that line returned; None while it has not, or could not."""
        return self._scene.table

    @property
    def status(self) -> str:
        """What the line under the figure says."""
        text: str = self._controls.status.value
        return unescape(text.partition(">")[2].removesuffix("</span>"))

    @property
    def metric(self) -> str:
        """What the heat map and the trajectory show: a metric of `Explorer.layers`."""
        return self._wish.metric

    @metric.setter
    def metric(self, metric: str) -> None:
        _choose(self._controls.metric, metric)

    @property
    def kind(self) -> str:
        """The kind of tensors, or patterns of kinds with commas between."""
        return written(self._wish.kinds)

    @kind.setter
    def kind(self, kind: str) -> None:
        self._show_layers(kinds=patterns_in(kind))

    @property
    def timeline(self) -> str:
        """The metric of the training that is shown above."""
        return self._wish.timeline

    @timeline.setter
    def timeline(self, name: str) -> None:
        _choose(self._controls.timeline, name)

    @property
    def filter(self) -> str:
        """Patterns of tensor names with commas between."""
        return written(self._wish.names)

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
        known = self._scene.steps
        inside = [i for i, step in enumerate(known) if steps[0] <= step <= steps[1]]
        if not inside:
            there = f"those there are go from {known[0]} to {known[-1]}" if known else "there is none yet"
            raise NotFoundError(f"no checkpoint from step {steps[0]} to {steps[1]}; {there}")
        self._controls.range.index = (inside[0], inside[-1])

    def select(self, layer: str, step: int) -> None:
        """Look into a layer at a step, as a click on its cell does: the trajectory and the magnitudes of the tensor of it that
        stands out there; or into a tensor, by its name."""
        self._wish = replace(self._wish, picked=(layer, step), gesture="detail")
        self._submit("detail", self._scene.show_detail, self._wish)

    def pick(self, a: "Ref", b: "Ref") -> None:
        """Compare two checkpoints, as the button does with the steps picked beside it."""
        self._wish = replace(self._wish, gesture="diff")
        self._submit("diff", self._scene.show_diff, self._wish, a, b)

    def refresh(self) -> None:
        """Look at the history again: new checkpoints, metrics and statistics appear."""
        self._look()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all gestures are shown; False when the time is over first. An error that is none of the history's is
        raised."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """End what runs; what is shown stays, but can't be touched any more. No thread is left."""
        if self._watcher is not None:
            self._watcher.close()
        self._worker.close()
        self._controls.disable()
        self._controls.root.dsh_kept = None

    def __repr__(self) -> str:
        return static.text(self._scene, status=self.status)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        self.wait(_PATIENCE_S)
        self._controls.root.dsh_kept = self  # what is on a page lives as long as it can be touched
        return {
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self._controls.root.model_id,
            },
            "text/html": static.page(self._scene, status=self.status),
            "text/plain": repr(self),
        }

    def _listen(self) -> None:
        c = self._controls
        for piece, react in (
            (c.metric, self._on_metric),
            (c.kind, self._on_kind),
            (c.filter, self._on_filter),
            (c.timeline, self._on_timeline),
            (c.range, self._on_range),
            (c.code, self._on_code),
        ):
            piece.observe(_weakly(react), "value")
        c.diff_button.on_click(_weakly(self._on_diff))
        c.previous.on_click(_weakly(self._on_previous))
        c.next.on_click(_weakly(self._on_next))
        next(trace for trace in c.figure.data if trace.name == "heat").on_click(_weakly(self._on_cell))

    def _submit(self, topic: str, show: Callable[..., None], *arguments: Any) -> None:
        self._worker.submit(topic, lambda: show(*arguments))

    def _look(self) -> None:
        self._submit("timeline", self._scene.show_timeline, self._wish)
        self._submit("layers", self._scene.show_layers, self._wish)
        self._submit("anomalies", self._scene.show_anomalies)

    def _on_metric(self, change: Any) -> None:
        self._show_layers(metric=change["new"])

    def _on_kind(self, change: Any) -> None:
        self._show_layers(kinds=patterns_in(change["new"]))

    def _on_filter(self, change: Any) -> None:
        self._show_layers(names=patterns_in(change["new"]))

    def _on_range(self, change: Any) -> None:
        steps = self._scene.steps
        first, last = change["new"]
        if steps:
            self._show_layers(first=None if first == steps[0] else first, last=None if last == steps[-1] else last)

    def _show_layers(self, **changed: Any) -> None:
        if not self._worker.is_me:
            self._wish = replace(self._wish, **changed, gesture="layers")
            self._submit("layers", self._scene.show_layers, self._wish)

    def _on_timeline(self, change: Any) -> None:
        if not self._worker.is_me:
            self._wish = replace(self._wish, timeline=change["new"], gesture="timeline")
            self._submit("timeline", self._scene.show_timeline, self._wish)

    def _on_code(self, change: Any) -> None:
        if not self._worker.is_me:
            self._controls.code.value = self._scene.code  # a line to copy, not to edit

    def _on_cell(self, trace: Any, points: Any, state: Any) -> None:
        if points.xs:
            self.select(unescape(str(points.ys[0])), int(points.xs[0]))

    def _on_diff(self, button: Any) -> None:
        a, b = self._controls.step_a.value, self._controls.step_b.value
        if a is not None and b is not None:
            self.pick(a, b)

    def _on_previous(self, button: Any) -> None:
        self._submit("page", self._scene.turn_page, -1)

    def _on_next(self, button: Any) -> None:
        self._submit("page", self._scene.turn_page, 1)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The bound method as a callback that keeps nothing alive."""
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
