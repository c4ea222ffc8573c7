"""What of a step's state does not wait for the next update: the generators, the data loader's position, and buffers that
forward changes. It is kept after every step, so that the step can still be captured later as it was.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from capture.snapshot.change_detector import ChangeDetector
from capture.snapshot.data_file import PlacedObject
from capture.state.interface import StateProvider
from capture.state.providers import Buffers, DataloaderPosition, ExtraState, RandomState

__all__ = ["Moments", "TransientState"]

_SMALL_BYTES = 512 << 10
"""Smaller buffers are always kept: a batch norm writes its statistics without telling the version counter."""

_Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TransientState:
    """The passing part of the state right after `step`. `buffers` are copies of those that may change; `weights` tells
    whether what was to stay until the next update has stayed.
    """

    step: int
    weights: ChangeDetector
    objects: Sequence[PlacedObject]
    buffers: Mapping[str, torch.Tensor]
    marks: Mapping[str, _Mark]


class Moments:
    """Takes the moments of a run, and learns on the way which buffers change."""

    def __init__(self, providers: Iterable[StateProvider]) -> None:
        found = list(providers)
        self.providers = tuple(one for one in found if isinstance(one, (DataloaderPosition, ExtraState, RandomState)))
        self._buffers = [one for one in found if isinstance(one, Buffers)]
        self._marks: dict[str, _Mark] = {}
        self._changing: set[str] = set()

    def take(self, step: int, weights: ChangeDetector, objects: Sequence[PlacedObject]) -> TransientState:
        """The moment of `step`, whose passing objects are `objects`."""
        marks = self._look()
        self._changing |= {name for name, mark in marks.items() if self._marks.get(name, mark) != mark}
        self._marks = marks
        kept = {
            name: buffer.detach().clone()
            for provider in self._buffers
            for name, buffer in provider.live()
            if buffer.nbytes <= _SMALL_BYTES or name in self._changing
        }
        return TransientState(step, weights, objects, kept, marks)

    def lost(self, moment: TransientState) -> list[str]:
        """The buffers that have changed since `moment` for the first time, so that nobody had kept a copy."""
        now = self._look()
        return [name for name, mark in moment.marks.items() if name not in moment.buffers and now.get(name) != mark]

    def _look(self) -> dict[str, _Mark]:
        return {
            name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
            for provider in self._buffers
            for name, buffer in provider.live()
        }
