"""States what the writers of weights need of a state: a checkpoint of a history has it, and a computed state too."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import torch

__all__ = ["T", "TensorFacts", "Weights"]


class TensorFacts(Protocol):
    """One tensor that can be read: its dtype as safetensors names it, its shape, and its bytes in memory."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=TensorFacts)


class Weights(Protocol[T]):
    """Weights and persistent buffers by name, and the elements of each; the formats that hold an optimizer too need a
    whole `CheckpointTensors`."""

    @property
    def ref(self) -> object:
        """The reference that the metadata of files gives as the origin of the weights."""

    def parameters(self, weights: str) -> dict[str, T]:
        """Return the parameters by first name."""

    def state_dict(self, weights: str) -> dict[str, T]:
        """Return parameters and persistent buffers by first name, sorted by name."""

    def aliases(self) -> dict[str, str]:
        """Return {further name: first name} of tied tensors."""

    def pieces(self, tensor: T) -> Iterator[torch.Tensor]:
        """Yield the elements front to back, flat."""

    def whole(self, tensor: T) -> torch.Tensor:
        """Return the whole tensor in host memory."""
