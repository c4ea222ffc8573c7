"""The explorer's reports on the content of a history: checkpoints, tags, tables for SQL, and damage."""

from typing import TYPE_CHECKING

from dshistory.display.report import Report
from dshistory.display.table import Table, with_unique_names
from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Ref
from dshistory.patterns import Patterns
from dshistory.registry import verb
from dshistory.reports import show

if TYPE_CHECKING:
    from dshistory.reports.log import LogTable

__all__ = ["Reports"]


class Reports(OpenedHistory):
    """The verbs of the room `reports`."""

    @verb("log", "log --run 20261121-101502-7f3a9c --metrics 'eval_*'")
    def log(self, *, run: str | None = None, metrics: Patterns | None = None) -> "LogTable":
        """List the checkpoints, oldest first: step, metrics, bytes, state, health and tags.

        Health comes from the statistics: ok, or how many elements are not finite, and in how many tensors. Infinities
        in buffers do not count, because masks contain them. Health is unknown (null) without statistics, and "damaged:
        needs ..." names the file of a checkpoint that is gone, its own or one that it refers to. New bytes are those
        that the checkpoint's own files take on disk.

        Args:
            run: only this run; default: all runs
            metrics: patterns of the training's own metrics that get a column, as 'eval_*'; default: the first eight
        """
        from dshistory.reports import log

        return log.log(self.history, run=self._named(run), metrics=metrics)

    @verb("show", "show 1200", "show best")
    def show(self, ref: Ref = "latest") -> Report:
        """Describe one checkpoint: its kinds, objects and files, with their bytes.

        Args:
            ref: the checkpoint
        """
        return show.show(self.history, self.history.resolve(ref))

    @verb("tags")
    def tags(self) -> Table:
        """List the tags, with the checkpoint that each of them names."""
        return show.tags(self.history)

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

        Where every byte is right, a checkpoint whose weights are exactly those of an earlier step of its run, although
        updates were applied between them, is a problem too.

        Args:
            ref: only this checkpoint; default: all of them
            quiet: no progress bar
        """
        return show.verify(self.history, None if ref is None else [self.history.resolve(ref)], quiet=quiet)

    @verb("fingerprints", "fingerprints --run 20261121-101502-7f3a9c")
    def fingerprints(self, *, run: str | None = None) -> Table:
        """List the fingerprints of a run: a row for each step and rank, captured or not.

        A row says of how many tensors there is a digest of all bytes, and of how many one of a sample. Equal digests of
        two runs at the same step mean that their tensors agree as far as they were looked at.

        Args:
            run: the run; default: the current run
        """
        from dshistory.reports import fingerprints

        return fingerprints.fingerprints(self.history, self._named(run) or self.history.current_run())

    @verb("rank_agreement", name="rank_agreement")
    def rank_agreement(self, *, run: str | None = None) -> Table:
        """Find tensors that should be the same on several ranks and are not: a row for each, the earliest step first.

        Weights and moments under data parallelism and ZeRO 1 and 2, and whatever tensor parallelism leaves whole, such
        as LayerNorms, are compared at every step by their fingerprints; partitions and buffers are not. `ranks` are the
        ranks that hold the same. No rows where all agree.

        Args:
            run: the run; default: the current run
        """
        from dshistory.reports import fingerprints

        return fingerprints.rank_agreement(self.history, self._named(run) or self.history.current_run())

    @verb("reindex")
    def reindex(self) -> int:
        """Rebuild the index from manifests, markers and journals; return how many checkpoints it contains.

        The index contains only what these files contain, so nothing is lost."""
        return self.history.reindex()
