"""The history as a person asks it: every verb is a method here or, about a whole run, of `OverTime`, and nowhere else."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catalog.errors import SetupError
from catalog.history import History
from dshistory.display.report import Report
from dshistory.display.table import Table, told_apart
from dshistory.options import ExportFormat, Grouping, Weights
from dshistory.over_time import OverTime, Ref
from dshistory.patterns import Patterns
from dshistory.reports import show

if TYPE_CHECKING:
    import torch

    from dshistory.comparison.diff import DiffTable
    from dshistory.reports.log import LogTable
    from dshistory.widgets import Exploration

__all__ = ["Explorer"]


class Explorer(OverTime):
    """One history, opened for looking; holds no lock and no file, also while a training writes it.

    Every method reads what is committed at the moment of the call. Errors are those of `catalog.errors`."""

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
        from dshistory.reports import log

        return log.log(self.history, run=run)

    def show(self, ref: Ref = "latest") -> Report:
        """What one checkpoint consists of: kinds, objects and files, with their bytes.

        Args:
            ref: the checkpoint
        """
        return show.show(self.history, self.history.resolve(ref))

    def tags(self) -> Table:
        """The tags, with the checkpoints that they name."""
        return show.tags(self.history)

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
            metrics: only these columns, as cosine or 'norm_*', the rows ordered by the first of them
            exact: read the tensors, however large
            tensor: look into this one, of the one kind: a row for each index along an axis
            axis: the axis of that tensor: 0 for its rows
            parts: cut the axis into so many equal parts, as for the heads of an attention
            quiet: no progress bar
        """
        from dshistory.comparison import diff, drilldown

        before, after = self.history.resolve(a), self.history.resolve(b)
        if tensor is not None:
            if not isinstance(kinds, str):
                raise SetupError(f"diff: tensor= is looked into in one kind, not in {kinds}")
            table = drilldown.drill_down(
                self.history, before, after, name=tensor, kind=kinds, axis=axis, parts=parts, quiet=quiet
            )
        else:
            table = diff.diff(self.history, before, after, kinds=kinds, names=names, by=by, exact=exact, quiet=quiet)
        return table if metrics is None else table.only(metrics)

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
        """The widget of `explore`, live: what a training commits and logs appears while it runs, until `close()` or until
        this explorer watches anew: a cell that is run again leaves nothing behind.

        Args:
            names: patterns of tensor names to begin with, as '*.mlp.*'
            kinds: patterns of kinds to begin with: model, master, exp_avg, ...; '*' for all
            run: this run and its parents; default: the current run, also when a new one begins
            seconds: between two looks at the history
        """
        from dshistory import widgets

        return widgets.watch(self, names, kinds=kinds, run=run, seconds=seconds)

    def tensor(self, name: str, step: Ref = "latest", *, state: str = "model") -> "torch.Tensor":
        """One logical tensor of one checkpoint: reads only its own bytes and verifies them.

        Args:
            name: the tensor's name, or an alias of it
            step: the checkpoint
            state: model, buffer, master, exp_avg, ...
        """
        from dshistory.comparison import diff

        return diff.tensor(self.history, self.history.resolve(step), name=name, kind=state)

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
        from dshistory.conversion import exporting

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
        tags, events. Nothing can be changed. Of columns of one name the others get a number.

        Args:
            query: the SQL; $name stands for a value
            params: values for the $names of the query
        """
        return Table(told_apart(self.history.query(query, params)))

    def verify(self, ref: Ref | None = None, *, quiet: bool = False) -> Table:
        """Read everything again and compare it with its checksums: a row for each problem, with file and field; none
        when all is well.

        Args:
            ref: only this checkpoint; else all of them
            quiet: no progress bar
        """
        return show.verify(self.history, None if ref is None else [self.history.resolve(ref)], quiet=quiet)

    def analyze(self, ref: Ref | None = None, *, quiet: bool = False) -> int:
        """Compute the statistics that a training had no time for: returns how many checkpoints lacked some.

        Args:
            ref: only of this checkpoint; else of all
            quiet: no progress bar
        """
        from dshistory.reports import analyze

        refs = self.history.checkpoints() if ref is None else [self.history.resolve(ref)]
        return analyze.analyze(self.history, refs, quiet=quiet)

    def reindex(self) -> int:
        """Rebuild the index from manifests, markers and journals: returns how many checkpoints it has.

        The index holds nothing that is not in those files, so this loses nothing."""
        return self.history.reindex()

    def __repr__(self) -> str:
        return repr(show.overview(self.history))

    def _repr_html_(self) -> str:
        return show.overview(self.history)._repr_html_()
