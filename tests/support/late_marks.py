"""Marks of a simulated device that computes only when a mark makes it."""

from collections.abc import Callable, Iterable

import torch

__all__ = ["LateMark", "LateMarks"]


class LateMark:
    def __init__(self, device: "LateMarks", work: list[Callable[[], object]]) -> None:
        self._device = device
        self._work = work

    def wait(self) -> None:
        self._device.compute(self._work)

    def precede(self, tensors: Iterable[torch.Tensor]) -> None:
        self._device.compute(self._work)
        self._device.kept_for_reading += tensors


class LateMarks:
    """Owns every tensor. What `give` is told is done when a mark behind it is waited for, and not before."""

    def __init__(self) -> None:
        self.recording = False
        self.kept_for_reading: list[torch.Tensor] = []
        self._given: list[Callable[[], object]] = []
        self._done: list[Callable[[], object]] = []

    def give(self, work: Callable[[], object]) -> None:
        self._given.append(work)

    def compute(self, work: list[Callable[[], object]]) -> None:
        for one in work:
            if one not in self._done:
                self._done.append(one)
                one()

    def owns(self, tensor: torch.Tensor) -> bool:
        return True

    def is_recording(self) -> bool:
        return self.recording

    def mark(self, device: torch.device) -> LateMark:
        assert not self.recording, "a mark in a graph can't be waited for"
        return LateMark(self, self._given.copy())
