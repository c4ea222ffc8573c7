"""A checkpoint of another program, as its reader describes it: tensors by logical name, each loaded on request."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from capture.state.dtypes import dtype_name
from catalog.format.dtypes import DTYPES

__all__ = ["ForeignCheckpoint", "ForeignTensor", "Reader", "in_memory", "other_files"]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One logical tensor; `read` loads it whole, in the stated dtype and shape, at every call."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """The content of a foreign checkpoint.

    `step` is the one in its content, None when there is none; `left_out` names what is not imported, and why; `facts`
    describe the run, such as its configuration; `metrics` are the values of its log, by step and name."""

    tensors: Sequence[ForeignTensor]
    objects: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    left_out: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[tuple[int, str], float] = field(default_factory=dict)


class Reader(Protocol):
    """A module that reads one format; it recognises by names, so that nothing is read before the choice is made."""

    def recognises(self, path: Path) -> bool:
        """Return whether the file or folder is a checkpoint of this format, by names alone."""

    def read(self, path: Path) -> ForeignCheckpoint:
        """Return the content. Raises FormatError or UnsupportedError, with the part that cannot be read."""


def in_memory(kind: str, name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> ForeignTensor:
    """Wrap a tensor that is loaded or mapped. Raises UnsupportedError for a dtype that a history cannot hold."""
    dtype = dtype_name(tensor.dtype, what=f"{kind} {name!r}")
    return ForeignTensor(kind, name, dtype, tuple(tensor.shape), lambda: tensor, aliases)


def other_files(folder: Path, read: Iterable[Path]) -> list[str]:
    """Return the names in a folder of one checkpoint that were not read, sorted: they are left out of the import."""
    return sorted({child.name for child in folder.iterdir()} - {file.name for file in read})
