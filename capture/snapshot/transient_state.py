"""The part of a step's state that does not wait for the next update, kept so that the step can still be captured later.

The generators, the data loader's position and the buffers change with the next batch. They are copied after every step
that is not captured; everything else stays in the training's memory until the next update begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from capture.changes.change_detector import ChangeDetector
from capture.data_file.data_file import PlacedObject
from capture.state.interface import ChangedByForward, StateProvider

__all__ = ["BufferKeeper", "KeptBuffers", "TransientState"]

_SMALL_BYTES = 512 << 10
"""Smaller buffers are always kept: a batch norm writes its statistics without telling the version counter."""

_Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KeptBuffers:
    """Copies, by name, of the buffers that may change, and the identity and version of every buffer."""

    copies: Mapping[str, torch.Tensor]
    versions: Mapping[str, _Version]


@dataclass(frozen=True, slots=True)
class TransientState:
    """The kept state of `step`. `objects` has the encoded objects of some providers, by the provider's id; `weights`
    finds out whether the state that was to stay until the next update has stayed, None after a declared edit: the step
    then is what is in memory when it is captured. `accessed`: something was loaded or moved since.
    """

    step: int
    weights: ChangeDetector | None
    buffers: KeptBuffers
    objects: Mapping[int, Sequence[PlacedObject]]
    accessed: bool = False


class BufferKeeper:
    """Copies the buffers of a run after its steps, and learns which of the large ones change at all."""

    def __init__(self, providers: Iterable[StateProvider]) -> None:
        self._providers = [one for one in providers if isinstance(one, ChangedByForward)]
        self._versions: dict[str, _Version] = {}
        self._changing: set[str] = set()

    def keep(self) -> KeptBuffers:
        """Copy the buffers that are small or were seen to change since an earlier call."""
        versions = self._read_versions()
        self._changing |= {name for name, now in versions.items() if self._versions.get(name, now) != now}
        self._versions = versions
        copies = {
            name: buffer.detach().clone()
            for provider in self._providers
            for name, buffer in provider.live()
            if buffer.nbytes <= _SMALL_BYTES or name in self._changing
        }
        return KeptBuffers(copies, versions)

    def lost(self, kept: KeptBuffers) -> list[str]:
        """Return the buffers that have changed since `kept` for the first time, so that there is no copy of them."""
        now = self._read_versions()
        return [name for name, then in kept.versions.items() if name not in kept.copies and now.get(name) != then]

    def _read_versions(self) -> dict[str, _Version]:
        return {
            name: (id(buffer), -1 if buffer.is_inference() else buffer._version)
            for provider in self._providers
            for name, buffer in provider.live()
        }
