"""The explorer's verbs about what a history takes on the disk, and what of it is removed."""

from typing import TYPE_CHECKING

from catalog.retention.policy import Keep
from dshistory.display.report import Report
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
        there: `needed_by` counts them. `other` is what a run takes beside its checkpoints, such as its journal.

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
