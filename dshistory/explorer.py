"""The history as a person asks it: every verb is a method here, and only here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.errors import SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from dshistory import listing
from dshistory.choices import ExportFormat, Grouping, Metric, Weights
from dshistory.naming import Patterns
from dshistory.report import Report
from dshistory.table import Table

if TYPE_CHECKING:
    import torch

    from dshistory.bisection import Bisection, Checkpoint
    from dshistory.differences import DiffTable
    from dshistory.geometry import DistanceTable
    from dshistory.histograms import HistogramTable
    from dshistory.logbook import LogTable
    from dshistory.per_layer import LayersTable
    from dshistory.trajectories import TrajectoryTable
    from dshistory.widgets import Exploration

__all__ = ["Explorer", "Predicate", "Ref"]

Ref = int | str | CheckpointRef
"""A checkpoint: a step (of the current run and its parents), -1 or "latest", "best", a tag, "run:step" or "run:best"."""

Predicate = str | Callable[["Checkpoint"], Any]
"""What is asked of a checkpoint: a metric, as "loss > 4.5", or a function of a `dshistory.bisection.Checkpoint`."""


class Explorer:
    """One history, opened for looking; holds no lock and no file, also while a training writes it.

    Every method reads what is committed at the moment of the call. Errors are those of `catalog.errors`."""

    def __init__(self, history: History) -> None:
        self.history = history

    @classmethod
    def open(cls, path: Path | str) -> "Explorer":
        """The history in that folder. Raises NotFoundError when there is none, FormatError when it is of a newer
        version."""
        return cls(History.open(path))

    @property
    def root(self) -> Path:
        """The folder of the history."""
        return self.history.root

    def log(self, *, run: str | None = None) -> "LogTable":
        """The checkpoints, oldest first: step, metrics, bytes, state, health, tags.

        Health is from the statistics: ok, or how much is not finite (Inf in buffers counts not: masks have it); unknown
        (null) without statistics. New bytes are what its files take on disk.

        Args:
            run: only this run; else all of them
        """
        from dshistory import logbook

        return logbook.log(self.history, run=run)

    def show(self, ref: Ref = "latest") -> Report:
        """What one checkpoint consists of: kinds, objects and files, with their bytes.

        Args:
            ref: the checkpoint
        """
        return listing.show(self.history, self.history.resolve(ref))

    def tags(self) -> Table:
        """The tags, with the checkpoints that they name."""
        return listing.tags(self.history)

    def diff(
        self,
        a: Ref,
        b: Ref = "latest",
        *,
        kinds: Patterns = "model",
        names: Patterns = "*",
        by: Grouping = "tensor",
        exact: bool = False,
        tensor: str | None = None,
        axis: int = 0,
        parts: int | None = None,
        quiet: bool = False,
    ) -> "DiffTable":
        """What changed from checkpoint a to checkpoint b: a row per logical tensor, the most moved first.

        In float64, whatever world size or stage wrote the two; reads in bounded memory, and not at all what is equal by
        checksum. Where more than 256 MiB would have to be read, what has sketches is estimated from them at once, unless
        exact; the column bound says how far off that may be. Where values are not finite, norms and changes are over the
        elements finite on both sides.

        Args:
            a: the checkpoint before
            b: the checkpoint after
            kinds: patterns of kinds: model, buffer, master, exp_avg, ...; '*' for all
            names: patterns of tensor names, as '*.mlp.*'
            by: a row for each tensor, or for each layer or kind, with norms as of one long vector
            exact: read the tensors, however large
            tensor: look into this one, of the one kind: a row for each index along an axis
            axis: the axis of that tensor: 0 for its rows
            parts: cut the axis into so many equal parts, as for the heads of an attention
            quiet: no progress bar
        """
        from dshistory import differences, drilldown

        before, after = self.history.resolve(a), self.history.resolve(b)
        if tensor is not None:
            if not isinstance(kinds, str):
                raise SetupError(f"diff: tensor= is looked into in one kind, not in {kinds}")
            return drilldown.drill_down(
                self.history, before, after, name=tensor, kind=kinds, axis=axis, parts=parts, quiet=quiet
            )
        return differences.diff(self.history, before, after, kinds=kinds, names=names, by=by, exact=exact, quiet=quiet)

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
        from dshistory import trajectories

        return trajectories.trajectory(
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
        from dshistory import per_layer

        return per_layer.layers(
            self.history, names=names, metric=metric, kinds=kinds, run=run, first=first, last=last, quiet=quiet
        )

    def histogram(self, name: str, *, kind: str = "model", run: str | None = None) -> "HistogramTable":
        """How large the elements of a tensor are over the checkpoints of a run and its parents, from the statistics: a row for
        each checkpoint and power of two.

        Args:
            name: the tensor's name
            kind: model, buffer, master, exp_avg, ...
            run: this run and its parents; default: the current run
        """
        from dshistory import histograms

        return histograms.histogram(self.history, name=name, kind=kind, run=run)

    def explore(self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> "Exploration":
        """The history as a widget: timeline, layers by steps, one tensor over time, a diff; each gesture shows its line of Python.

        Needs the [notebook] extra: SetupError where it is not installed.

        Args:
            names: patterns of tensor names to begin with, as '*.mlp.*'
            kinds: patterns of kinds to begin with: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
        """
        from dshistory import widgets

        return widgets.explore(self, names, kinds=kinds, run=run)

    def watch(
        self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None, seconds: float = 1.0
    ) -> "Exploration":
        """The widget of `explore`, live: what a training commits and logs appears while it runs, until `close()`.

        Args:
            names: patterns of tensor names to begin with, as '*.mlp.*'
            kinds: patterns of kinds to begin with: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run, also when a new one begins
            seconds: between two looks at the history
        """
        from dshistory import widgets

        return widgets.watch(self, names, kinds=kinds, run=run, seconds=seconds)

    def distances(self, names: Patterns = "*", *, kinds: Patterns = "model", run: str | None = None) -> "DistanceTable":
        """How far each checkpoint is from each other: of a run and its parents, estimated from sketches; .path() puts them
        into the plane.

        Args:
            names: patterns of tensor names, as '*.mlp.*'
            kinds: patterns of kinds: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run
        """
        from dshistory import geometry

        return geometry.step_distances(self.history, run=run, names=names, kinds=kinds)

    def anomalies(self, *, run: str | None = None) -> Table:
        """What is out of line in a run and its parents, from the statistics: a row for each kind of trouble and tensor, with
        the first step at which it is seen.

        Not finite; norm jumps, large update: five times more than in any of the eight checkpoints before; second moment
        explodes: a hundred times more; goes to zero: half of a weight's elements.

        Args:
            run: this run and its parents; default: the current run
        """
        from dshistory import outliers

        return outliers.anomalies(self.history, run=run)

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
                .tensor(name, kind=...) and .state_dict(), and returns whether it holds
            good: a checkpoint at which it does not hold yet; default: the first
            bad: a later one at which it holds; default: the last
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory import bisection

        return bisection.bisect(self.history, predicate, good=good, bad=bad, run=run, quiet=quiet)

    def tensor(self, name: str, step: Ref = "latest", *, kind: str = "model") -> "torch.Tensor":
        """One logical tensor of one checkpoint: reads only its own bytes and verifies them.

        Args:
            name: the tensor's name, or an alias of it
            step: the checkpoint
            kind: model, buffer, master, exp_avg, ...
        """
        from dshistory import differences

        return differences.tensor(self.history, self.history.resolve(step), name=name, kind=kind)

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
        """Put a training back to a checkpoint, bit for bit; without a target, return its tensors by kind and name.

        Args:
            ref: the checkpoint
            engine: a DeepSpeed engine
            model: a torch module, with its optimizer, scheduler and scaler
            dataloader: the loader to put back to its position
            providers: the training's own State Providers
            names: only tensors whose names fit, without a target only
            kinds: only these kinds, without a target only
            verify: look at all bytes before the first is overwritten
        """
        import capture
        from dshistory.restored import RestoredState

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

    def export(
        self,
        step: Ref,
        path: Path | str,
        *,
        format: ExportFormat = "safetensors",
        weights: Weights = "model",
        shard_bytes: int | None = None,
        config: Path | str | None = None,
        model: Any = None,
        zero_stage: int | None = None,
        world_size: int | None = None,
        overwrite: bool = False,
        quiet: bool = False,
    ) -> Table:
        """Write a checkpoint in another format: a row for each file written, with its bytes.

        Whole or not at all: it is made beside `path` under a temporary name, made durable, and named last. Raises SetupError,
        with what there is, for an unknown format, a place that is taken, or an option that the format does not have;
        NotFoundError for what the checkpoint does not have.

        Args:
            step: the checkpoint
            path: the file or folder to make
            format: safetensors, huggingface, dcp, torch; deepspeed or universal, which have the optimizer too
            weights: model, or master for the fp32 weights that the optimizer updates
            shard_bytes: safetensors and huggingface: a folder of files of at most so many bytes, with their index
            config: huggingface: a config.json, or a folder that has one
            model: huggingface: a model (or its configuration) in place of config
            zero_stage: deepspeed: 0, 1, 2 or 3; default: that of the run
            world_size: deepspeed: for so many ranks; default: those of the run
            overwrite: replace what is at path
            quiet: no progress bar
        """
        from dshistory import exporting

        ref = self.history.resolve(step)
        wanted = exporting.options(
            weights=weights,
            shard_bytes=shard_bytes,
            config=config,
            model=model,
            zero_stage=zero_stage,
            world_size=world_size,
        )
        return exporting.export(
            self.history, ref, Path(path), format=format, options=wanted, overwrite=overwrite, quiet=quiet
        )

    def sql(self, /, query: str, **params: object) -> Table:
        """The rows of a DuckDB query over the catalog: runs, checkpoints, tensors, statistics, sketches, fragments, metrics,
        tags, events. Nothing can be changed.

        Args:
            query: the SQL; $name stands for a value
            params: values for the $names of the query
        """
        return Table(self.history.query(query, params))

    def verify(self, ref: Ref | None = None, *, quiet: bool = False) -> Table:
        """Read everything again and compare it with its checksums: a row for each problem, with file and field; none
        when all is well.

        Args:
            ref: only this checkpoint; else all of them
            quiet: no progress bar
        """
        return listing.verify(self.history, None if ref is None else [self.history.resolve(ref)], quiet=quiet)

    def analyze(self, ref: Ref | None = None, *, quiet: bool = False) -> int:
        """Compute the statistics that a training had no time for: returns how many checkpoints lacked some.

        Args:
            ref: only of this checkpoint; else of all
            quiet: no progress bar
        """
        from dshistory import analysis

        refs = self.history.checkpoints() if ref is None else [self.history.resolve(ref)]
        return analysis.analyze(self.history, refs, quiet=quiet)

    def reindex(self) -> int:
        """Rebuild the index from manifests, markers and journals: returns how many checkpoints it has.

        The index holds nothing that is not in those files, so this loses nothing."""
        return self.history.reindex()

    def __repr__(self) -> str:
        return repr(listing.overview(self.history))

    def _repr_html_(self) -> str:
        return listing.overview(self.history)._repr_html_()
