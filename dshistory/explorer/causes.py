"""The explorer's search for what made a training do what it did."""

from typing import TYPE_CHECKING

from dshistory.explorer.opened import OpenedHistory
from dshistory.options import Ref
from dshistory.patterns import Patterns
from dshistory.registry import verb

if TYPE_CHECKING:
    from dshistory.causes.audit import AuditTable
    from dshistory.causes.audits import AuditsTable
    from dshistory.causes.diagnose import DiagnosisTable

__all__ = ["Causes"]


class Causes(OpenedHistory):
    """The verbs of the room `causes`."""

    @verb("audit", "audit 1249 1250 --names '*.mlp.*'")
    def audit(
        self, a: Ref | None = None, b: Ref = "latest", *, names: Patterns = "*", quiet: bool = False
    ) -> "AuditTable":
        """Check the optimizer's books from one checkpoint to another: whether the movement of every weight follows from
        the optimizer's own state.

        Over one update of torch's or DeepSpeed's Adam or AdamW, or of SGD with momentum, this recovers the gradient
        that was consumed, and by least squares the learning rate and the decay that really acted. What exceeds the
        rounding of the formats is a cause: another learning rate or decay, weights or state that were edited, swapped,
        reset or are not finite. Over several updates only counts and second moments can be checked.
        `dshistory.causes.books` has the formulas.

        Args:
            a: the checkpoint before, or a step of a redo log; default: the checkpoint right before b in its run, of a
               step of a redo log the step before it
            b: the checkpoint after, or a step of a redo log
            names: patterns of parameter names, as '*.mlp.*'
            quiet: no progress bar
        """
        from dshistory.causes import audit

        after = self._readable(b)
        before = None if a is None else self._readable(a)
        return audit.audit(self.history, before, after, names=names, quiet=quiet)

    @verb("audit_all")
    def audit_all(self, *, run: str | None = None, redo: bool = False, quiet: bool = False) -> "AuditsTable":
        """Audit every checkpoint of a run and its parents against the one before it, and keep what was found beside the
        run, as the SQL table `audit`: per run, step and parameter the gradient's norm and noise, Adam's signal to
        noise, the learning rate and decay that acted, and what does not balance.

        A row for each checkpoint, with its worst parameter and the norm of the whole gradient. What is there already is
        not computed again, so a call that was interrupted goes on where it stopped. Reads the tensors of every
        checkpoint twice.

        Args:
            run: this run and its parents; default: the current run
            redo: also every step between that a redo log has, and each checkpoint, against the step before it; each is
               made again twice. What was audited against a step further back is audited again, and the table has what
               is known against the nearest
            quiet: no progress bar
        """
        from dshistory.causes import audits

        return audits.audit_all(self.history, run=self._named(run), redo=redo, quiet=quiet)

    @verb("diagnose", "diagnose 83")
    def diagnose(self, step: int | None = None, *, run: str | None = None, quiet: bool = False) -> "DiagnosisTable":
        """Find what made a training do what it did: a few causes, the likeliest first, each with its evidence and the
        call that shows it.

        Looks at the metrics of every step, at the groups and the statistics of the checkpoints of a run and its
        parents, and audits the most unusual ones. Each row has the cause, the step at which it set in at the latest,
        the step `since` which it may have, what it hit, and the evidence. The causes: learning rate, learning rate of a
        group, weight decay, betas, eps, momentum, optimizer state reset, foreign optimizer state, layer corrupted,
        layers swapped, embedding row, dead units, frozen, updates vanish, norm grows, clipping off, bad batch, not
        finite. What a cause brought about is named in its row, and has rows in `.consequences`. No row: nothing was
        found; the note says what could not be checked.

        Args:
            step: what happened up to this step; default: the whole run
            run: this run and its parents; default: the current run
            quiet: no progress bar
        """
        from dshistory.causes import diagnose

        return diagnose.diagnose(self.history, step, run=self._named(run), quiet=quiet)
