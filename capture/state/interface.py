"""The interface types of capture: what state there is, where it lives, how to put it back. Moves no bytes."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from catalog.records import Placement

__all__ = ["Available", "Fingerprinted", "StateProvider", "TensorItem"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorItem:
    """A live reference to one fragment of one logical tensor; never a copy.

    `tensor` is dense memory (contiguous in some order of its own dimensions, flattened as stored) whose numel elements
    are `[start, start + numel)` of the logical tensor `name` of global `shape`. `when` says how long it may be read:
    "lazy" until the next barrier, "eager" only at the step itself (buffers, 0-dim state). `placement` "replicated"
    items are offered whole by every rank; the plan gives each rank its share. `dtensor` is another tensor by which the
    same memory is written, such as the DTensor around it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    start: int = 0
    placement: Placement = "replicated"
    when: Literal["lazy", "eager"] = "lazy"
    aliases: tuple[str, ...] = ()
    dtensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Available:
    """What a checkpoint offers to a provider before a restore: (kind, name) of its tensors with shape and dtype, and
    its decoded objects.
    """

    tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
    objects: Mapping[str, Any]


@runtime_checkable
class StateProvider(Protocol):
    """Says what state there is, where it lives, and how to put it back; moves no bytes.

    The surface is just this because staging, layout, checksums and resharding are the same for all state. A provider of
    objects only
    returns () from `tensors`. Names must be unique within a kind over all providers of a session.
    """

    def tensors(self) -> Sequence[TensorItem]:
        """The fragments this rank holds now, as live references."""

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        """Plain data to encode at the step: None, bool, int, float, str, bytes, list, tuple, dict, tensors and numpy
        arrays. Called at every snapshot.
        """

    def prepare(self, available: Available) -> None:
        """Before a restore: make the state that the checkpoint has and this process does not yet have (empty optimizer
        state), so that `tensors` lists every target. Raises MismatchError when it can't fit; changes no value that
        training has produced.
        """

    def finish(self, available: Available) -> None:
        """After the bytes are in place: put the objects back and refresh what is derived (low-precision copies,
        schedulers).
        """


@runtime_checkable
class Fingerprinted(Protocol):
    """What a State Provider has beside, so that a snapshot of an unchanged layout does not list its tensors again."""

    def fingerprint(self) -> Hashable:
        """Quickly told, and equal to what it was as long as `tensors` would list the same memory in the same form."""
