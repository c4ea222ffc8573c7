"""The explorer: one object for one history, with a method for every verb."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dshistory.explorer.causes import Causes
from dshistory.explorer.comparison import Comparison
from dshistory.explorer.conversion import Conversion
from dshistory.explorer.reports import Reports
from dshistory.explorer.trends import Trends
from dshistory.options import Ref
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.widgets import Exploration

__all__ = ["Explorer"]


class Explorer(Reports, Comparison, Trends, Causes, Conversion):
    """One history, opened for reading; holds no lock and no open file, also while a training writes the history.

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

    @verb("restore 1200 --kinds model", surfaces=("magic",))
    def restore(
        self,
        ref: Ref = "latest",
        *,
        engine: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        providers: Sequence[Any] = (),
        names: Patterns | None = None,
        kinds: Patterns | None = None,
        verify: bool = True,
    ) -> Any:
        """Restore a training to a checkpoint, bit for bit; without a target, return its tensors by kind and name.

        Args:
            ref: the checkpoint
            engine: a DeepSpeed engine
            model: a torch module, with its optimizer, scheduler and scaler
            dataloader: the data loader, which continues at its position
            providers: the training's own State Providers
            names: only tensors whose names match; without a target only
            kinds: only these kinds; without a target only
            verify: check every byte before the first one is overwritten
        """
        import capture
        from dshistory.tensors.state_dict import RestoredState

        done = capture.restore(
            ref,
            history=self.root,
            engine=engine,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            dataloader=dataloader,
            providers=providers,
            names=names,
            kinds=kinds,
            verify=verify,
        )
        return RestoredState(done) if isinstance(done, dict) else done
