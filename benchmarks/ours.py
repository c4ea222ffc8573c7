"""DSHistory with the same four calls as the peers, through `capture` on plain PyTorch as a user calls it."""

from pathlib import Path

import capture
import catalog.index.index  # noqa: F401  the code of its libraries is no memory of a save
from benchmarks.training_state import Training

NEVER = 1_000_000_000
"""A value for `every` with which no step is captured automatically."""


class Ours:
    """A saver with one session for all its saves, as in a training; its barrier is the hook that `enable` installs."""

    name = "DSHistory"

    def __init__(self, root: Path, *, every: int = NEVER, stats_every: int = 0) -> None:
        self.history = root / "history"
        self.every = every
        self.stats_every = stats_every
        self.session: capture.Session | None = None

    def ready(self, training: Training) -> None:
        """Enable a new session for each turn, because a restore closes the session of the objects it overwrites."""
        if self.session is None:
            self.session = capture.enable(
                training.model,
                optimizer=training.optimizer,
                every=self.every,
                stats_every=self.stats_every,
                history=self.history,
            )
            self.session.wait()

    def begin(self, training: Training, folder: Path) -> None:
        assert self.session is not None, "ready comes first"
        self.step = self.session.snapshot()

    def before_update(self) -> None: ...  # the hook of the session waits

    def durable(self) -> None:
        if self.session is not None:
            self.session.wait()
            assert not self.session.stats.unchanged_bytes, "what is measured is writing: all of the state must change"

    def load(self, training: Training) -> None:
        assert self.session is not None, "ready comes first"
        ref = f"{self.session.run}:{self.step}"
        capture.restore(ref, history=self.history, model=training.model, optimizer=training.optimizer, verify=False)
        self.session = None

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class OursEvery(Ours):
    """A saver that captures every `every`-th step with the hooks of `enable` alone."""

    def begin(self, training: Training, folder: Path) -> None: ...
