"""What a reader finds in a foreign checkpoint: tensors under logical names, each read when it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from capture.state.dtypes import dtype_name
from catalog.format.dtypes import DTYPES

__all__ = ["Found", "FoundTensor", "Reader", "in_memory"]


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """One logical tensor; `read` gives it whole, in the stated dtype and shape, every time it is called."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class Found:
    """A foreign checkpoint. `step` as the checkpoint itself says it, None if it does not; `left_out` names what it has that is
    not imported, and why; `facts` are of the run, such as its configuration."""

    tensors: Sequence[FoundTensor]
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    left_out: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class Reader(Protocol):
    """One format. Two questions, since what a folder holds must be known before anything of it is read."""

    def recognises(self, path: Path) -> bool:
        """Whether the file or folder is a checkpoint of this format, by its names alone."""

    def read(self, path: Path) -> Found:
        """What it has. FormatError or UnsupportedError names what can't be read."""


def in_memory(kind: str, name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> FoundTensor:
    """A tensor that is loaded (or mapped) already. UnsupportedError for a dtype that a history can't hold."""
    dtype = dtype_name(tensor.dtype, what=f"{kind} {name!r}")
    return FoundTensor(kind, name, dtype, tuple(tensor.shape), lambda: tensor, aliases)
