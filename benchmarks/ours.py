"""DSHistory behind the same moments as the peers, through `capture` on plain PyTorch as a user calls it."""

from pathlib import Path

import capture
from benchmarks.training_state import Training


class Ours:
    """One session for all its saves, as in a training; its barrier is the hook that `enable` puts before the update."""

    name = "DSHistory"

    def __init__(self, training: Training, root: Path, *, every: int = 1_000_000_000) -> None:
        self.history = root / "history"
        self.session = capture.enable(training.model, optimizer=training.optimizer, every=every, history=self.history)
        self.session.wait()

    def begin(self, training: Training, folder: Path) -> None:
        self.step = self.session.snapshot()

    def before_update(self) -> None: ...  # its own hook waits

    def durable(self) -> None:
        self.session.wait()

    def load(self, training: Training) -> None:
        capture.restore(
            f"{self.session.run}:{self.step}", history=self.history, model=training.model, optimizer=training.optimizer
        )

    def close(self) -> None:
        self.session.close()
