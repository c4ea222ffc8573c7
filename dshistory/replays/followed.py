"""The training that a replay follows: its checkpoints and metrics after the step at which the replay begins."""

from collections.abc import Mapping
from typing import Any

from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.lineage_batches import lineage_batches
from catalog.lineage_metrics import lineage_metrics
from catalog.records import CheckpointRef
from catalog.references import generations, lineage
from dshistory.replays.traces import Stretch

__all__ = ["Followed", "losses_of"]


class Followed:
    """Knows what came after `ref`: in the lineage of the current run where `ref` is part of it, else in its own run."""

    def __init__(self, history: History, ref: CheckpointRef) -> None:
        self.history = history
        self.ref = ref
        self.run = _current(history, ref)
        """The run that is followed, with its parents."""
        chain = lineage(history.paths, self.run)
        if ref not in chain:
            self.run = ref.run
            chain = lineage(history.paths, ref.run)
        self.checkpoints = {one.step: one for one in chain if one.step > ref.step}
        """The checkpoints after `ref`, by step."""

    def stretches(self) -> list[Stretch]:
        """Return the part of each run that is followed, from `ref` on."""
        found: list[Stretch] = []
        after = self.ref.step
        for run, until in reversed(generations(self.history.paths, self.run)):
            if until is None:
                found.append(Stretch(run, after, None))
            elif until > after:
                found.append(Stretch(run, after, until))
                after = until
        return found

    def losses(self) -> Mapping[int, float]:
        """Return the loss of every step after `ref` that has one."""
        losses = lineage_metrics(self.history.paths, self.run, ["loss"]).get("loss", {})
        return {step: loss for step, loss in losses.items() if step > self.ref.step}

    def first_other_batch(self, run: str) -> int | None:
        """Return the first step after `ref` at which a rank of `run`, which goes on from `ref`, was given another batch
        than that rank here; None where all that both know are the same."""
        ours, theirs = (lineage_batches(self.history.paths, one) for one in (self.run, run))
        return next(
            (
                step
                for step in sorted(ours.keys() & theirs.keys())
                if step > self.ref.step
                and any(
                    ours[step][rank].reader == theirs[step][rank].reader and ours[step][rank] != theirs[step][rank]
                    for rank in ours[step].keys() & theirs[step].keys()
                )
            ),
            None,
        )

    def first_other_rate(self, run: str) -> tuple[int, float, float] | None:
        """Return the first step after `ref` that `run`, which goes on from `ref`, made with another learning rate than
        was used here, then that rate, then the one here; None where all that both have recorded are the same."""
        ours, theirs = (lineage_metrics(self.history.paths, one, ["lr"]).get("lr", {}) for one in (self.run, run))
        return next(
            (
                (step, theirs[step], ours[step])
                for step in sorted(ours.keys() & theirs.keys())
                if step > self.ref.step and theirs[step] != ours[step]
            ),
            None,
        )

    def last_step(self) -> int:
        """Return the last step that was captured or has a loss. SetupError when nothing came after `ref`."""
        known = [*self.checkpoints, *self.losses()]
        if not known:
            raise SetupError(
                f"replay: nothing came after {self.ref} in its run: name the last step with until=, or begin earlier"
            )
        return max(known)


def losses_of(history: History, run: str) -> dict[int, float]:
    """Return the losses of a run by step."""
    rows: list[dict[str, Any]] = history.query(
        "SELECT step, value FROM metrics WHERE run = ? AND name = 'loss' ORDER BY step", [run]
    ).to_pylist()
    return {row["step"]: row["value"] for row in rows}


def _current(history: History, ref: CheckpointRef) -> str:
    try:
        return history.current_run()
    except NotFoundError:
        return ref.run
