"""The view of the runs: the tree of them, and those that are chosen side by side; in the worker's thread, as `View`."""

from typing import TYPE_CHECKING

from dshistory.display.table import Table
from dshistory.replays.side_by_side import ComparedRuns
from dshistory.widgets.gesture import Gesture
from dshistory.widgets.runs_controls import RunsControls

if TYPE_CHECKING:
    from dshistory.widgets.view import View

__all__ = ["RunsView"]


class RunsView:
    """The tables of runs that are shown. A comparison is of the moment of its gesture: it is not made again whenever
    the history grows, since it looks at every checkpoint."""

    def __init__(self, view: "View", controls: RunsControls) -> None:
        self._view, self._controls = view, controls
        self.table: Table | None = None
        self._compared: ComparedRuns | None = None
        self._call = Gesture("compare")

    def show_runs(self) -> None:
        """List the runs, where there are several."""
        state = self._view.state
        self.table = self._view.call(state, "runs", Gesture("runs"))
        self._controls.show_runs(self.table, state.runs)
        self._view.set_message("runs", "")

    def show_comparison(self) -> None:
        """Compare the runs that are chosen."""
        state = self._view.state
        self._compared = None
        if self.table is not None:
            self._controls.mark(self.table, state.runs)
        if len(state.runs) < 2:
            self.show_picture()
            return
        self._call = Gesture("compare", state.runs, {"names": state.names, "kinds": state.kinds})
        self._controls.show_comparison(f"{self._call.code} …", None, state.picture)
        try:
            self._compared = self._view.call(state, "comparison", self._call)
        except Exception:
            self._controls.show_comparison("", None, state.picture)
            raise
        self._view.controls.offer(self._controls.picture, self._compared.figures(), state.picture)
        self.show_picture()
        self._view.set_message("comparison", self._compared.note)

    def show_picture(self) -> None:
        """Draw the chosen picture of the runs that are compared; no query."""
        state, compared = self._view.state, self._compared
        call = self._call.then("plot", *(() if state.picture == "loss" else (state.picture,)))
        self._controls.show_comparison(call.code if compared is not None else "", compared, state.picture)
        if compared is not None and state.gesture == "comparison":
            self._view.set_code(call.code, compared)
