"""The time that capturing takes in a training loop, measured around the hooks of every contender."""

import time
from typing import Any

from torch.utils.hooks import RemovableHandle

from benchmarks.training_state import Training


class HookClock:
    """A clock for the seconds between the first and the last hook before an update, after it, and before a forward.

    Hooks that are registered between the construction and `seal` run between these two, so all of their waiting counts.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.seconds = 0.0
        self._sealed: list[RemovableHandle] = []
        self._register(self._first)

    def seal(self) -> None:
        """Measure everything that is registered so far from now on."""
        for handle in self._sealed:
            handle.remove()
        self._sealed = self._register(self._last)

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _register(self, hook: Any) -> list[RemovableHandle]:
        optimizer, model = self.training.optimizer, self.training.model
        return [
            optimizer.register_step_pre_hook(hook),
            optimizer.register_step_post_hook(hook),
            model.register_forward_pre_hook(hook),
        ]

    def _first(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _last(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
