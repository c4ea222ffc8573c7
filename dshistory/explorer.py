"""The explorer: one object for one history, with a method for every verb; the rooms below do the work."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.errors import SetupError
from catalog.history import History
from dshistory.display.report import Report
from dshistory.display.table import Table, with_unique_names
from dshistory.options import ExportFormat, Grouping, Metric, Predicate, Ref
from dshistory.patterns import Patterns
from dshistory.registry import verb
from dshistory.reports import show

if TYPE_CHECKING:
    import torch

    from dshistory.causes.audit import AuditTable
    from dshistory.comparison.diff import DiffTable
    from dshistory.reports.log import LogTable
    from dshistory.trends.anomalies import AnomalyTable
    from dshistory.trends.bisect import Bisection
    from dshistory.trends.distances import DistanceTable
    from dshistory.trends.histogram import HistogramTable
    from dshistory.trends.layers_table import LayersTable
    from dshistory.trends.trajectory import TrajectoryTable
    from dshistory.widgets import Exploration

__all__ = ["Explorer"]


class Explorer:
    """One history, opened for reading; holds no lock and no open file, also while a training writes the history.

    Every method reads what is committed at the moment of the call. Errors are those of `catalog.errors`."""

    def __init__(self, history: History) -> None:
        self.history = history

    @classmethod
    def open(cls, path: Path | str) -> "Explorer":
        """Open the history in a folder. Raises NotFoundError when there is none, FormatError for a newer version."""
        return cls(History.open(path))

    @property
    def root(self) -> Path:
        """The folder of the history."""
        return self.history.root

    @verb("log", "log --run 20261121-101502-7f3a9c")
    def log(self, *, run: str | None = None) -> "LogTable":
        """List the checkpoints, oldest first: step, metrics, bytes, state, health and tags.

        Health comes from the statistics: ok, or how many elements are not finite, and in how many tensors. Infinities
        in buffers do not count, because masks contain them. Health is unknown (null) without statistics. New bytes are
        those that the checkpoint's own files take on disk.

        Args:
            run: only this run; default: all runs
        """
        from dshistory.reports import log

        return log.log(self.history, run=self._named(run))

    @verb("show", "show 1200", "show best")
    def show(self, ref: Ref = "latest") -> Report:
        """Describe one checkpoint: its kinds, objects and files, with their bytes.

        Args:
            ref: the checkpoint
        """
        return show.show(self.history, self.history.resolve(ref))

    @verb("diff 1200 1250", "diff 1200 latest --names '*.mlp.*' --kinds '*'")
    def diff(
        self,
        a: Ref,
        b: Ref = "latest",
        *,
        kinds: Patterns = "model",
        names: Patterns = "*",
        by: Grouping = "tensor",
        metrics: Patterns | None = None,
        exact: bool = False,
        tensor: str | None = None,
        axis: int = 0,
        parts: int | None = None,
        quiet: bool = False,
    ) -> "DiffTable":
        """Compare two checkpoints: a row for each logical tensor, the most unusual movement first.

        times_usual is how many times as far as its peers, the tensors of its name in all layers, a tensor moved,
        relative to its norm, or to that of a tensor of typical size where that is larger: neither a bias that was born
        at zero nor the noise in one that no gradient reaches comes first. A tensor without peers (an embedding, a head)
        is measured against the peers that moved most.
        Computed in float64, whatever world size or ZeRO stage wrote the two, in bounded memory; tensors with equal
        checksums are not read. When more than 256 MiB would have to be read, tensors with sketches are estimated from
        those unless `exact` is given; the column bound then gives the error bound. Where values are not finite, norms
        and changes cover the elements that are finite in both checkpoints.

        Args:
            a: the checkpoint before
            b: the checkpoint after
            kinds: patterns of kinds: model, buffer, master, exp_avg, ...; '*' for all
            names: patterns of tensor names, as '*.mlp.*'
            by: a row for each tensor, or for each layer or kind, with norms over its tensors as one long vector
            metrics: only these columns, as cosine or 'norm_*', with the rows ordered by the first of them
            exact: read the tensors, however large
            tensor: compare only this tensor, of a single kind: a row for each index along an axis
            axis: the axis of that tensor: 0 for its rows
            parts: cut the axis into this many equal parts, as for the heads of an attention
            quiet: no progress bar
        """
        from dshistory.comparison import diff, drilldown

        before, after = self.history.resolve(a), self.history.resolve(b)
        if tensor is not None:
            if not isinstance(kinds, str):
                raise SetupError(f"diff: tensor= needs a single kind, not {kinds}")
            if by != "tensor":
                raise SetupError(f"diff: by={by!r} groups tensors, and tensor={tensor!r} is one: leave one of them out")
            table = drilldown.drill_down(
                self.history, before, after, name=tensor, kind=kinds, axis=axis, parts=parts, quiet=quiet
            )
        else:
            table = diff.diff(self.history, before, after, kinds=kinds, names=names, by=by, exact=exact, quiet=quiet)
        return table if metrics is None else table.only(metrics)

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

    @verb("audit", "audit 1249 1250 --names '*.mlp.*'")
    def audit(
        self, a: Ref | None = None, b: Ref = "latest", *, names: Patterns = "*", quiet: bool = False
    ) -> "AuditTable":
        """Check the optimizer's books from one checkpoint to another: whether the movement of every weight follows from
        the optimizer's own state.

        Over one update of torch's Adam, AdamW or SGD with momentum this recovers the gradient that was consumed, and by
        least squares the learning rate and the decay that really acted. What exceeds the rounding of the formats is a
        cause: another learning rate or decay, weights or state that were edited, swapped, reset or are not finite. Over
        several updates only counts and second moments can be checked. `dshistory.causes.books` has the formulas.

        Args:
            a: the checkpoint before; default: the one right before b in its run
            b: the checkpoint after
            names: patterns of parameter names, as '*.mlp.*'
            quiet: no progress bar
        """
        from dshistory.causes import audit

        after = self.history.resolve(b)
        before = None if a is None else self.history.resolve(a)
        return audit.audit(self.history, before, after, names=names, quiet=quiet)

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

    @verb("tensor lm_head.weight 1200", "tensor lm_head.weight 1200 --state exp_avg")
    def tensor(self, name: str, step: Ref = "latest", *, state: str = "model") -> "torch.Tensor":
        """Read one logical tensor of one checkpoint: only its own bytes, verified against their checksums.

        Args:
            name: the tensor's name, or an alias of it
            step: the checkpoint
            state: model, buffer, master, exp_avg, ...
        """
        from dshistory.comparison import diff

        return diff.tensor(self.history, self.history.resolve(step), name=name, kind=state)

    @verb("tags")
    def tags(self) -> Table:
        """List the tags, with the checkpoint that each of them names."""
        return show.tags(self.history)

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

    @verb("resume_folder latest outputs/checkpoint-1200")
    def resume_folder(self, step: Ref, path: Path | str, *, overwrite: bool = False, quiet: bool = False) -> str:
        """Write the checkpoint folder from which Hugging Face's Trainer goes on, and return its path.

        `trainer.train(resume_from_checkpoint=h.resume_folder(...))` goes on with the same bits as from a checkpoint of
        the Trainer itself, plain or with its DeepSpeed integration: weights, optimizer, scheduler, scaler, random
        numbers of each rank, and position in the data. The training becomes a child of the run. The folder appears
        whole or not at all. Raises UnsupportedError, which says why, for a step that was not captured by
        HistoryCallback (or imported from a Trainer's folder), and for adapters of PEFT; SetupError when the folder
        exists.

        Args:
            step: the checkpoint
            path: the folder to create; the Trainer finds one in its output_dir named checkpoint-STEP by itself
            overwrite: replace what exists at path
            quiet: no progress bar
        """
        from dshistory.conversion import exporting

        final = Path(path).absolute()
        exporting.resume_folder(self.history, self.history.resolve(step), final, overwrite=overwrite, quiet=quiet)
        return str(final)

    @verb("export 1200 step-1200.safetensors", "export latest my-model --format huggingface --config config.json")
    def export(
        self,
        step: Ref,
        path: Path | str,
        *,
        format: ExportFormat = "safetensors",
        weights: str = "model",
        shard_bytes: int | None = None,
        config: Path | str | None = None,
        model: Any = None,
        zero_stage: int | None = None,
        world_size: int | None = None,
        overwrite: bool = False,
        quiet: bool = False,
    ) -> Table:
        """Write a checkpoint in another format: a row for each file written, with its bytes.

        The export is atomic: it is written beside `path` under a temporary name, made durable, and renamed last. Raises
        SetupError, with the valid choices, for an unknown format, a path that exists, or an option that the format does
        not have; NotFoundError for state that the checkpoint does not have.

        Args:
            step: the checkpoint
            path: the file or folder to create
            format: safetensors, huggingface, dcp, torch; deepspeed or universal, which include the optimizer
            weights: model, master for the fp32 weights that the optimizer updates, or the name of a State Provider that
                averages them, as ema
            shard_bytes: safetensors and huggingface: write a folder of files of at most this many bytes, with an index
            config: huggingface: a config.json, or a folder with one
            model: huggingface: a model (or its configuration) in place of config
            zero_stage: deepspeed: 0, 1, 2 or 3; default: that of the run
            world_size: deepspeed: the number of ranks; default: that of the run
            overwrite: replace what exists at path
            quiet: no progress bar
        """
        from dshistory.conversion import exporting

        ref = self.history.resolve(step)
        options = exporting.options(
            weights=weights,
            shard_bytes=shard_bytes,
            config=config,
            model=model,
            zero_stage=zero_stage,
            world_size=world_size,
        )
        return exporting.export(
            self.history, ref, Path(path), format=format, options=options, overwrite=overwrite, quiet=quiet
        )

    @verb(
        'sql "SELECT step, bytes FROM checkpoints"', "sql 'SELECT * FROM metrics WHERE step = $step' --params step=50"
    )
    def sql(self, /, query: str, **params: object) -> Table:
        """Query the catalog with SQL: the tables are runs, checkpoints, tensors, statistics, sketches, fragments,
        metrics, tags, events and lineage.

        DuckDB runs the query, which can read and cannot change anything. Columns of the same name get a number. After a
        restore, two runs have the same steps: `SEMI JOIN lineage USING (run, step)` leaves those of the current run and
        its parents, each once.

        Args:
            query: the SQL; $name stands for a value
            params: the values of the $names in the query
        """
        return Table(with_unique_names(self.history.query(query, params)))

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

    @verb("anomalies")
    def anomalies(self, *, run: str | None = None) -> "AnomalyTable":
        """Find anomalies in a run and its parents: a row for each kind of anomaly and tensor, with the step where it
        begins.

        The kinds, all from the statistics: not finite (`value` counts elements); norm jumps (a factor) and large update
        (the norm of the update over that of the tensor): five times more than in any of the eight checkpoints before,
        of which six must be there; second moment explodes (its largest element): a hundred times more; goes to zero
        (the share of zeros): half of a weight's elements. `usual` is the most before.

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
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.trends import bisect

        return bisect.bisect(self.history, predicate, good=good, bad=bad, run=self._named(run), quiet=quiet)

    @verb("analyze", "analyze 1200")
    def analyze(self, ref: Ref | None = None, *, quiet: bool = False) -> Table:
        """Compute the statistics that the training did not compute; return a row for each checkpoint that lacked some.

        After an interruption the statistics computed so far are kept. Raises SetupError when they cannot be written.

        Args:
            ref: only this checkpoint; default: all of them
            quiet: no progress bar
        """
        from dshistory.reports import analyze

        refs = self.history.checkpoints() if ref is None else [self.history.resolve(ref)]
        return analyze.analyze(self.history, refs, quiet=quiet)

    @verb("verify", "verify 1200")
    def verify(self, ref: Ref | None = None, *, quiet: bool = False) -> Table:
        """Verify every byte against its checksum: a row for each problem, with file and field; no rows when all is
        well.

        Args:
            ref: only this checkpoint; default: all of them
            quiet: no progress bar
        """
        return show.verify(self.history, None if ref is None else [self.history.resolve(ref)], quiet=quiet)

    @verb("reindex")
    def reindex(self) -> int:
        """Rebuild the index from manifests, markers and journals; return how many checkpoints it contains.

        The index contains only what these files contain, so nothing is lost."""
        return self.history.reindex()

    def _named(self, run: str | None) -> str | None:
        """Return the run of which a user gave the name, or its beginning."""
        return None if run is None else self.history.run_named(run)

    def __repr__(self) -> str:
        return repr(show.overview(self.history))

    def _repr_html_(self) -> str:
        return show.overview(self.history)._repr_html_()
