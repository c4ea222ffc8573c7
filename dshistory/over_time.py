"""The explorer's questions about all checkpoints of a run: how tensors and layers move, what is out of line, where it began."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.display.table import Table
from dshistory.options import Metric
from dshistory.patterns import Patterns

if TYPE_CHECKING:
    from dshistory.trends.bisect import Bisection, Checkpoint
    from dshistory.trends.distances import DistanceTable
    from dshistory.trends.histogram import HistogramTable
    from dshistory.trends.layers import LayersTable
    from dshistory.trends.trajectory import TrajectoryTable

__all__ = ["OverTime", "Predicate", "Ref"]

Ref = int | str | CheckpointRef
"""A checkpoint: a step (of the current run and its parents), -1 or "latest", "best", a tag, "run:step" or "run:best"."""

Predicate = str | Callable[["Checkpoint"], Any]
"""What is asked of a checkpoint: a metric, as "loss > 4.5", or a function of a `dshistory.trends.bisect.Checkpoint`."""


class OverTime:
    """Verbs over the checkpoints of a run and its parents; part of `Explorer`."""

    def __init__(self, history: History) -> None:
        self.history = history

    def trajectory(
        self,
        names: Patterns = "*",
        *,
        metric: Metric = "relative_update",
        kinds: Patterns = "model",
        by: str = "tensor",
        run: str | None = None,
        exact: bool = False,
        quiet: bool = False,
    ) -> "TrajectoryTable":
        """How tensors move over the checkpoints of a run and its parents: a row for each tensor and step.

        What is about a step alone comes from its statistics; without them norms are read, and the rest is unknown. What is about
        the way from the checkpoint before is exact or estimated as the diff is, and nothing is read that is equal by checksum.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            metric: of a step: norm, mean, std, rms, min, max, zeros (their share), nan, inf, nonfinite; or, from the checkpoint
                before, relative_update (or update_ratio, the same), update_norm, cosine, max_change, changed_share, sign_flips
            kinds: patterns of kinds: model, buffer, master, exp_avg, ...; '*' for all
            by: a row for each tensor, or for each layer or kind, as of one long vector
            run: this run and its parents; default: the current run
            exact: read the tensors, however large
            quiet: no progress bar
        """
        from dshistory.trends import trajectory

        return trajectory.trajectory(
            self.history, names=names, metric=metric, kinds=kinds, by=by, run=run, exact=exact, quiet=quiet
        )

    def layers(
        self,
        names: Patterns = "*",
        *,
        metric: str = "relative_update",
        kinds: Patterns = "model",
        run: str | None = None,
        first: int | None = None,
        last: int | None = None,
        quiet: bool = False,
    ) -> "LayersTable":
        """One number for each layer and checkpoint of a run and its parents, as of one long vector: a row for each.

        What is about a step alone comes from its statistics; relative_update, update_norm and cosine are estimated from sketches, over
        the tensors that have them; max_change, changed_share and sign_flips are read as a trajectory is. Unknown (null) where a
        checkpoint or the one before it has no statistics.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            metric: one of those of a trajectory
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
            first: from this step on
            last: up to this step
            quiet: no progress bar
        """
        from dshistory.trends import layers

        return layers.layers(
            self.history, names=names, metric=metric, kinds=kinds, run=run, first=first, last=last, quiet=quiet
        )

    def histogram(self, name: str, *, state: str = "model", run: str | None = None) -> "HistogramTable":
        """How large the elements of a tensor are over the checkpoints of a run and its parents, from the statistics: a row for
        each checkpoint and power of two.

        Args:
            name: the tensor's name
            state: model, buffer, master, exp_avg, ...
            run: this run and its parents; default: the current run
        """
        from dshistory.trends import histogram

        return histogram.histogram(self.history, name=name, kind=state, run=run)

    def distances(self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> "DistanceTable":
        """How far each checkpoint is from each other: of a run and its parents, estimated from sketches; .path() puts them
        into the plane.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
        """
        from dshistory.trends import distances

        return distances.step_distances(self.history, run=run, names=names, kinds=kinds)

    def anomalies(self, *, run: str | None = None) -> Table:
        """What is out of line in a run and its parents, from the statistics: a row for each kind of trouble and tensor, with
        the first step at which it is seen.

        Not finite; norm jumps, large update: five times more than in any of the eight checkpoints before; second moment
        explodes: a hundred times more; goes to zero: half of a weight's elements.

        Args:
            run: this run and its parents; default: the current run
        """
        from dshistory.trends import anomalies

        return anomalies.anomalies(self.history, run=run)

    def bisect(
        self,
        predicate: Predicate,
        good: Ref | None = None,
        bad: Ref | None = None,
        *,
        run: str | None = None,
        quiet: bool = False,
    ) -> "Bisection":
        """The first checkpoint at which something holds, by binary search over a run and its parents, as with git bisect: a row
        for each checkpoint asked; `.first` is the one found, `.before` the one right before it.

        It is the first, if from there on it holds at all of them. Both ends are asked first: MismatchError, with both answers,
        when they don't differ as they should. SetupError, naming the checkpoint, when the predicate fails.

        Args:
            predicate: a metric, as 'loss > 4.5'; in Python also a function of a checkpoint, which has .step, .run, .metrics,
                .tensor(name, state=...) and .state_dict(), and returns whether it holds
            good: a checkpoint at which it does not hold yet; default: the first
            bad: a later one at which it holds; default: the last
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.trends import bisect

        return bisect.bisect(self.history, predicate, good=good, bad=bad, run=run, quiet=quiet)
