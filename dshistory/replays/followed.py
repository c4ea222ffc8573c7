"""The training that a replay follows: its checkpoints and metrics after the step at which the replay begins."""

from collections.abc import Mapping
from typing import Any

from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.records import CheckpointRef
from catalog.references import lineage

__all__ = ["Followed", "losses_of"]


class Followed:
    """What came after `ref`: in the lineage of the current run where `ref` is part of it, else in the run of `ref`."""

    def __init__(self, history: History, ref: CheckpointRef) -> None:
        self.history = history
        self.ref = ref
        chain = lineage(history.paths, _current(history, ref))
        if ref not in chain:
            chain = lineage(history.paths, ref.run)
        self.checkpoints = {one.step: one for one in chain if one.step > ref.step}
        """The checkpoints after `ref`, by step."""
        self._runs = [ref.run, *dict.fromkeys(one.run for one in chain if one.step > ref.step and one.run != ref.run)]

    @property
    def run(self) -> str:
        """The last of the runs that are followed."""
        return self._runs[-1]

    def losses(self) -> Mapping[int, float]:
        """Return the loss of every step after `ref` that has one. Of two runs with one step the later counts."""
        losses: dict[int, float] = {}
        for run in self._runs:
            losses |= losses_of(self.history, run)
        return {step: loss for step, loss in sorted(losses.items()) if step > self.ref.step}

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
