"""Rebuilds a step that was not captured: replayed from the checkpoint before it, and verified against what is known."""

import pyarrow as pa

from capture.replays.change import Change
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.read.fingerprints import fingerprinted_ranks, fingerprints_of
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.display.formats import counted
from dshistory.options import VERIFIED, Command
from dshistory.replays.followed import Followed
from dshistory.replays.live import Live
from dshistory.replays.result import ReplayTable, extent_of
from dshistory.replays.start import start

__all__ = ["RebuiltTable", "rebuild"]


class RebuiltTable(ReplayTable):
    """The replay that has rebuilt a step, row by row; see `ReplayTable`."""

    rebuilt: CheckpointRef
    """The checkpoint that the step is now: `diff`, `tensor`, `restore` and `export` take it."""
    verified_by: tuple[str, ...]
    """The step was found equal to these; empty where something differs."""

    @property
    def is_verified(self) -> bool:
        """True when something that is known of the step, or of the checkpoint after it, was compared and agrees."""
        return bool(self.verified_by)


def rebuild(
    history: History,
    step: int,
    live: Live,
    *,
    run: str | None,
    verify: str,
    command: Command,
    batches_per_step: int,
    quiet: bool,
) -> RebuiltTable:
    """See `Explorer.rebuild`."""
    if verify not in VERIFIED:
        raise SetupError(f"rebuild: verify={verify!r}: give {' or '.join(map(repr, VERIFIED))}")
    before, after = _neighbours(history, step, run)
    followed = Followed(history, before)
    known = _is_fingerprinted(followed, step)
    if after is None and not known:
        raise SetupError(
            f"rebuild: step {step} comes after {before}, the last checkpoint, and has no fingerprint: nothing could "
            f"tell whether it is rebuilt as it was; `replay({before.step}, until={step})` makes it all the same"
        )
    onward = after is not None and (verify == "next" or not known)
    replayed = start(
        history,
        before,
        until=after.step if after is not None and onward else step,
        also_at=frozenset({step}),
        change=Change(),
        command=command,
        batches_per_step=batches_per_step,
        quiet=quiet,
        live=live,
    )
    if step not in history.steps(replayed.run):
        raise SetupError(
            f"rebuild: the training ended before step {step}; what it captured is run {replayed.run}: {replayed.note}"
        )
    table = RebuiltTable(pa.table(replayed))
    vars(table).update(vars(replayed))
    table.rebuilt = CheckpointRef(replayed.run, step)
    table.verified_by = _verified_by(table, step, after if onward else None)
    table.note = _verdict(table, known=known, said=replayed.note)
    return table


def _neighbours(history: History, step: int, run: str | None) -> tuple[CheckpointRef, CheckpointRef | None]:
    """Return the checkpoints before and after a step. Errors for a step that is one, or that nothing leads to."""
    refs = committed_lineage(history.paths, run)
    same = next((ref for ref in refs if ref.step == step), None)
    if same is not None:
        raise SetupError(f"rebuild: {same} is captured: there is nothing to rebuild, restore it")
    before = max((ref for ref in refs if ref.step < step), key=lambda ref: ref.step, default=None)
    if before is None:
        raise NotFoundError(f"rebuild: step {step} comes before {refs[0]}, the first checkpoint: nothing leads to it")
    return before, min((ref for ref in refs if ref.step > step), key=lambda ref: ref.step, default=None)


def _is_fingerprinted(followed: Followed, step: int) -> bool:
    paths = followed.history.paths
    runs = [one.run for one in followed.stretches() if one.after < step and (one.until is None or step <= one.until)]
    found = (
        next(fingerprints_of(paths, run, rank, after=step - 1, until=step), None)
        for run in runs
        for rank in fingerprinted_ranks(paths, run)
    )
    return any(one is not None for one in found)


def _verified_by(table: RebuiltTable, step: int, after: CheckpointRef | None) -> tuple[str, ...]:
    if table.first_difference is not None:
        return ()
    said = []
    agreeing = {at: trace for at, trace in table.traces.items() if at <= step}
    if step in agreeing:
        said.append(
            f"the fingerprints of {counted(len(agreeing), 'step')} up to it agree ({extent_of(agreeing[step])})"
        )
    if after is not None and any(row["step"] == after.step and row["compared_by"] == "bits" for row in table):
        said.append(f"{after} comes out of it bit for bit")
    return tuple(said)


def _verdict(table: RebuiltTable, *, known: bool, said: str) -> str:
    made = f"step {table.rebuilt.step} rebuilt from {table.of} as {table.rebuilt}"
    if not table.verified_by:
        return f"{made}, NOT verified, it is not what the training had: {said}"
    only = "" if known else ", of which alone it can be said, since the run has no fingerprint of the step"
    return f"{made}; verified: {'; '.join(table.verified_by)}{only}"
