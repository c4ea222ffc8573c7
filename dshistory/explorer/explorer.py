"""The explorer: one object for one history, with a method for every verb."""

from typing import TYPE_CHECKING

from dshistory.explorer.causes import Causes
from dshistory.explorer.comparison import Comparison
from dshistory.explorer.conversion import Conversion
from dshistory.explorer.hindsight import Hindsight
from dshistory.explorer.replays import Replays
from dshistory.explorer.reports import Reports
from dshistory.explorer.retention import Retention
from dshistory.explorer.trends import Trends
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.widgets import Exploration

__all__ = ["Explorer"]


class Explorer(Reports, Retention, Comparison, Trends, Causes, Hindsight, Replays, Conversion):
    """One history, opened; holds no lock and no open file, also while a training writes the history.

    Every method reads what is committed at the moment of the call. Errors are those of `catalog.errors`."""

    @verb("explore", "explore '*.mlp.*'", surfaces=("magic",))
    def explore(self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> "Exploration":
        """Explore the history in a widget: a timeline, layers by steps, one tensor over time and a diff.

        Every gesture shows the line of Python that does the same. Needs the [notebook] extra; raises SetupError where
        it is not installed.

        Args:
            names: patterns of tensor names to begin with, as '*.mlp.*'
            kinds: patterns of kinds to begin with: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
        """
        from dshistory import widgets

        return widgets.explore(self, names, kinds=kinds, run=self._named(run))

    @verb("watch", "watch --seconds 5", surfaces=("magic",))
    def watch(
        self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None, seconds: float = 1.0
    ) -> "Exploration":
        """Watch a training in the widget of `explore`: checkpoints and metrics appear while it runs.

        The widget stays live until `close()` or until this explorer watches again, so a notebook cell that is run twice
        leaves no second watcher behind.

        Args:
            names: patterns of tensor names to begin with, as '*.mlp.*'
            kinds: patterns of kinds to begin with: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run, also when a new one begins
            seconds: the time between two looks at the history
        """
        from dshistory import widgets

        return widgets.watch(self, names, kinds=kinds, run=self._named(run), seconds=seconds)
