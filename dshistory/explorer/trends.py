"""The explorer's looks at all checkpoints of a run."""

from typing import TYPE_CHECKING, Any

from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Metric, Predicate, Ref, Steps
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.trends.anomalies import AnomalyTable
    from dshistory.trends.bisect import Bisection
    from dshistory.trends.distances import DistanceTable
    from dshistory.trends.histogram import HistogramTable
    from dshistory.trends.layers_table import LayersTable
    from dshistory.trends.spectra import SpectraTable
    from dshistory.trends.trajectory import TrajectoryTable

__all__ = ["Trends"]


class Trends(OpenedHistory):
    """The verbs of the room `trends`."""

    @verb("trajectory '*.mlp.*'", "trajectory lm_head.weight --metric norm --kinds '*'")
    def trajectory(
        self,
        names: Patterns = "*",
        *,
        metric: Metric = "relative_update",
        kinds: Patterns = "model",
        by: str = "tensor",
        run: Patterns | None = None,
        exact: bool = False,
        quiet: bool = False,
    ) -> "TrajectoryTable":
        """Follow tensors over the checkpoints of a run and its parents: a row for each tensor and step.

        Metrics of one checkpoint come from its statistics; without statistics norms are read from the tensors, and
        other metrics are unknown. Metrics of the change since the checkpoint before are exact or estimated as in a
        diff; tensors with equal checksums are not read.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            metric: of one checkpoint: norm, mean, std, rms, min, max, zeros (their share), nan, inf, nonfinite; of the
                change since the checkpoint before: relative_update (or update_ratio, the same), update_norm, cosine,
                max_change, changed_share, sign_flips
            kinds: patterns of kinds: model, buffer, master, exp_avg, ...; '*' for all
            by: a row for each tensor, or for each layer or kind, over its tensors as one long vector
            run: this run and its parents, or several runs, to compare them; default: the current run
            exact: read the tensors, however large
            quiet: no progress bar
        """
        from dshistory.trends import trajectory

        runs = [run] if run is None or isinstance(run, str) else list(run)
        return trajectory.trajectory(
            self.history,
            names=names,
            metric=metric,
            kinds=kinds,
            by=by,
            runs=[self._named(one) for one in runs],
            exact=exact,
            quiet=quiet,
        )

    @verb("layers", "layers '*.mlp.*' --metric norm --first 1000")
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
        """Follow layers over the checkpoints of a run and its parents: a row for each, over its tensors as one long
        vector.

        Metrics of one checkpoint come from its statistics. relative_update, update_norm and cosine are estimated from
        sketches, over the tensors that have them; max_change, changed_share and sign_flips are computed as in a
        trajectory. A value is unknown (null) where the checkpoint or the one before it has no statistics.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            metric: a metric of `trajectory`
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
            first: the first step
            last: the last step
            quiet: no progress bar
        """
        from dshistory.trends import layers

        return layers.layers(
            self.history,
            names=names,
            metric=metric,
            kinds=kinds,
            run=self._named(run),
            first=first,
            last=last,
            quiet=quiet,
        )

    @verb("histogram lm_head.weight", "histogram lm_head.weight --state exp_avg_sq")
    def histogram(
        self, name: str, *, state: str = "model", run: str | None = None, signs: bool = False, quiet: bool = False
    ) -> "HistogramTable":
        """Show the magnitudes of a tensor's elements over a run and its parents: a row for each checkpoint and power of
        two.

        The counts come from the statistics. These do not know signs, so with `signs` the tensor is read.

        Args:
            name: the tensor's name
            state: model, buffer, master, exp_avg, ...
            run: this run and its parents; default: the current run
            signs: count negative and positive elements apart
            quiet: no progress bar
        """
        from dshistory.trends import histogram

        return histogram.histogram(self.history, name=name, kind=state, run=self._named(run), signs=signs, quiet=quiet)

    @verb("distances", "distances '*.mlp.*'")
    def distances(self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> "DistanceTable":
        """Estimate the distances between the checkpoints of a run and its parents, from sketches; `.path()` maps them
        to the plane.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
        """
        from dshistory.trends import distances

        return distances.step_distances(self.history, run=self._named(run), names=names, kinds=kinds)

    @verb("spectra", "spectra --steps 'last 10' --names '*.weight'")
    def spectra(
        self,
        *,
        steps: Steps = "latest",
        names: Patterns = "*",
        kind: str = "model",
        top: int = 5,
        run: str | None = None,
        quiet: bool = False,
    ) -> "SpectraTable":
        """Compute the spectra of matrices at checkpoints: their largest singular values, and how many directions they
        use.

        A row for each tensor of two or more dimensions, whose later dimensions count as one, however it was sharded:
        the largest singular value; `stable_rank`, the sum of the squares of all over the square of the largest
        (Rudelson and Vershynin, arXiv:math/0503442); `effective_rank`, the exponential of the entropy of their shares
        (Roy and Vetterli, EUSIPCO 2007); and the `top` largest. Unknown where a matrix is not finite, and the effective
        rank also where its smaller side exceeds 4096. Reads one matrix at a time. `.plot("stable_rank")` draws the
        steps.

        Args:
            steps: checkpoints, as 20, "10, 20" or "last 10"; None for all of the run and its parents
            names: patterns of tensor names, as '*.mlp.*'
            kind: model, master, exp_avg, ...
            top: so many singular values are kept
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.hindsight.chosen_steps import chosen_steps
        from dshistory.trends import spectra

        refs = chosen_steps(self.history, steps, run=self._named(run), verb="spectra")
        return spectra.spectra(self.history, refs, names=names, kind=kind, top=top, quiet=quiet)

    @verb("anomalies")
    def anomalies(self, *, run: str | None = None) -> "AnomalyTable":
        """Find anomalies in a run and its parents: a row for each event, with the step where it begins; `.details` has
        one for each kind of anomaly and tensor, `.event(1)` those of an event.

        Loss, gradient norm and learning rate of every step: not finite; rises (above all of the eight steps before, by
        more than five times the largest change among them). The kinds from the statistics: not finite (`value` counts
        elements); norm jumps (a factor) and large update (the norm of the update over that of the tensor): five times
        more than in any of the eight checkpoints before, of which six must be there; second moment explodes (its
        largest element): a hundred times more; goes to zero (the share of zeros): half of a weight's elements. `usual`
        is the most before.

        Args:
            run: this run and its parents; default: the current run
        """
        from dshistory.trends import anomalies

        return anomalies.anomalies(self.history, run=self._named(run))

    @verb("bisect 'loss > 4.5'", "bisect 'grad_norm > 10' 1200 latest")
    def bisect(
        self,
        predicate: Predicate,
        good: Ref | None = None,
        bad: Ref | None = None,
        *,
        model: Any = None,
        run: str | None = None,
        quiet: bool = False,
    ) -> "Bisection":
        """Find the first checkpoint at which a condition holds: a binary search over a run and its parents, as git
        bisect.

        Returns a row for each checkpoint tested; `.first` is the one found, `.before` the one right before it. It is
        the first one provided that the condition holds at every later checkpoint. Both ends are tested first. Raises
        MismatchError, with both answers, when they do not differ as they should; SetupError, with the checkpoint, when
        the predicate fails.

        Args:
            predicate: a condition on a metric, as 'loss > 4.5'; in Python also a function that returns whether it holds
                for a checkpoint with .step, .run, .metrics, .tensor(name, state=...) and .state_dict()
            good: a checkpoint at which it does not hold yet; default: the first
            bad: a later one at which it holds; default: the last
            model: a torch module: the function then gets it with the weights and buffers of each checkpoint, in the
                mode for evaluation; it is as it was afterwards
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.trends import bisect

        return bisect.bisect(
            self.history, predicate, good=good, bad=bad, model=model, run=self._named(run), quiet=quiet
        )
