"""The explorer's verbs about what a history takes on the disk, and what of it is removed."""

from typing import TYPE_CHECKING

from catalog.retention.policy import Keep
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Steps
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.retention.removal import RemovalTable

__all__ = ["Retention"]


class Retention(OpenedHistory):
    """The verbs of the room `retention`."""

    @verb("usage", "usage --run 20261121-101502-7f3a9c")
    def usage(self, *, run: str | None = None) -> Report:
        """Say what the history takes on the disk: its runs, their kinds of state, and what removing a checkpoint frees.

        Bytes are those of the file system. A checkpoint to whose bytes others refer frees nothing as long as they are
        there: `needed_by` counts them. `redo` is the redo log of a run, and `other` what it takes beside log and
        checkpoints, such as its journal; `index` is the index that answers queries, which belongs to no run. Of a kind
        they are the bytes before packing: `referred` those that earlier checkpoints have, and `derived` those that are
        in no file, because readers make them of float32 masters.

        Args:
            run: only this run; default: all runs
        """
        from dshistory.retention import usage

        return usage.usage(self.history, run=self._named(run))

    @verb("prune 'last 20, every 1000, best 3 by loss, 50GB'", "prune 'last 5' --run 20261121-101502-7f3a9c --yes")
    def prune(self, keep: Keep, *, run: str | None = None, dry_run: bool = True) -> "RemovalTable":
        """Remove the checkpoints that a policy does not keep: a row for each that goes, with the reason and what it
        frees.

        By default nothing is removed yet. A policy is a list of rules with commas: last 20; every 1000 (steps); every
        30m; best 3 by loss; best 3 by accuracy max; one per 1h for 2d (thinning with age); tagged; 50GB (a budget, for
        all runs together). What one of them keeps stays; where the budget does not reach, the last rule gives way
        first. The newest checkpoint stays in any case, and the newest healthy one, tagged ones, those that a reader has
        open or a child run goes on from, and whatever these refer to. A run that is being written is left to its
        session. Raises SetupError for a policy that would keep nothing, or that can't be met.

        Args:
            keep: the policy, as text or as rules
            run: only this run; default: every run by itself
            dry_run: only say what would be removed
        """
        from dshistory.retention import removal

        return removal.prune(self.history, keep, run=self._named(run), dry_run=dry_run)

    @verb("compact", "compact 'last 100' --key-every 20", "compact --run 20261121-101502-7f3a9c --newest 0")
    def compact(
        self,
        steps: Steps | None = None,
        *,
        run: str | None = None,
        key_every: int = 10,
        newest: int = 1,
        quiet: bool = False,
    ) -> Table:
        """Pack the data files of checkpoints without loss, so that they take less disk: a row for each.

        Whoever reads a packed checkpoint gets the very bytes of before, a little later. Key frames are packed by
        themselves, the others against the key frame before them, which is kept as long as they are there. Each file is
        unpacked again and compared before the original goes; interrupted anywhere, nothing is lost, and the next call
        goes on. Runs that are being written are left out (`capture.enable(..., compact=True)` packs those), and what a
        reader has open. Raises SetupError when a run that was named is being written.

        Args:
            steps: a list of checkpoints, or 'last 10'; default: all but the newest
            run: only this run; default: every run that nobody writes
            key_every: of so many checkpoints one is a key frame
            newest: without steps: how many of the newest of each run stay as they are
            quiet: no progress bar
        """
        from dshistory.hindsight.chosen_steps import chosen_steps
        from dshistory.retention import compaction

        name = self._named(run)
        refs = None if steps is None else chosen_steps(self.history, steps, run=name, verb="compact")
        return compaction.compact(self.history, refs, run=name, key_every=key_every, newest=newest, quiet=quiet)

    @verb("remove 40", "remove '10, 20, 30' --yes")
    def remove(self, refs: Steps, *, force: bool = False, dry_run: bool = False) -> "RemovalTable":
        """Remove checkpoints by name, all of them or none: a row for each, with what it frees.

        Raises SetupError, with the reason, where one of them must stay: another one refers to its bytes, a reader has
        it open, its run is being written; and, unless forced, it has a tag, a child run goes on from it, or it is the
        last healthy one of its run.

        Args:
            refs: the checkpoints
            force: remove also what has a tag, what a child run goes on from, and the last healthy one
            dry_run: only say what would be removed
        """
        from dshistory.retention import removal

        return removal.remove(self.history, refs, force=force, dry_run=dry_run)
