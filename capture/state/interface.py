"""The interface types of capture: which state exists, where it is in memory, how to put it back. Moves no bytes."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch

from catalog.errors import SetupError
from catalog.records import Placement

__all__ = [
    "Available",
    "ChangedByForward",
    "Fingerprinted",
    "HoldsWeights",
    "ReadAt",
    "Rooted",
    "StateProvider",
    "TensorItem",
    "is_looked_at",
    "read_at",
]

ReadAt = Literal["before_update", "step", "next_forward"]
"""When the objects of a State Provider belong to a step, as the provider itself declares in its attribute `read_at`:

"next_forward": the loop advances them after the update, as a scheduler; they are read when the next training forward,
    or the next update, begins.
"step": they are read when the update has ended, after every step, because the next batch advances them (a generator) or
    the resumed loop does (a scheduler that moves by epochs).
"before_update": only an update changes them, so they can be read at any time until the next one begins.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TensorItem:
    """A live reference to one fragment of one logical tensor; never a copy.

    `tensor` is dense memory (contiguous in some order of its own dimensions, flattened as stored) whose numel elements
    are `[start, start + numel)` of the logical tensor `name` of global `shape`. `when` says how long it may be read:
    "lazy" until the next barrier, "eager" only at the step itself (buffers, 0-dim state). `placement` "replicated"
    items are offered whole by every rank; the plan gives each rank its share. `dtensor` is the DTensor around `tensor`,
    through which the same memory can be written. `owner` is the training's own tensor object with exactly this memory;
    while an item is kept for the next snapshot, its memory is free as soon as the training lets it go. None: the item
    holds it. `rounded_to`: the dtype of its copy in the file, where that is another one. `written`: the elements
    `[begin, end)` of a replicated item that this rank writes, where that is not for the plan to say.
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
    owner: torch.Tensor | None = None
    rounded_to: torch.dtype | None = None
    written: tuple[int, int] | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of its elements in the file."""
        return self.tensor.dtype if self.rounded_to is None else self.rounded_to

    @property
    def label(self) -> str:
        """Its kind and name, as messages show them."""
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Available:
    """The content of a checkpoint, for providers that prepare a restore: (kind, name) of its tensors with shape and
    dtype, and its decoded objects.
    """

    tensors: Mapping[tuple[str, str], tuple[tuple[int, ...], str]]
    objects: Mapping[str, Any]


@runtime_checkable
class StateProvider(Protocol):
    """Lists state, says where it is in memory, and puts it back; moves no bytes.

    The surface is this small because staging, layout, checksums and resharding are the same for all state. A provider
    of objects only returns () from `tensors`. Names must be unique within a kind over all providers of a session.

    A provider may declare when its objects are read with an attribute or property `read_at` (see `ReadAt`); without one
    they are read at the next forward.
    """

    def tensors(self) -> Sequence[TensorItem]:
        """Return the fragments that this rank holds now, as live references."""

    def objects(self) -> Mapping[str, tuple[Any, Placement]]:
        """Return plain data to encode: None, bool, int, float, str, bytes, list, tuple, dict, tensors and numpy arrays,
        each under its name and with its placement. Called for every snapshot, when `read_at` says.
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
class Fingerprinted(StateProvider, Protocol):
    """A State Provider that can tell cheaply that its tensors are the same, so that they are not listed again."""

    def fingerprint(self) -> Hashable:
        """Return a value that stays equal as long as `tensors` would list the same memory in the same form."""


@runtime_checkable
class Rooted(Fingerprinted, Protocol):
    """A fingerprinted State Provider that can be asked after every step, because its answer costs 50 ns a tensor."""

    def roots(self) -> tuple[Iterable[Any], Sequence[torch.Tensor]]:
        """Return the objects through which the provider finds its tensors, these tensors among them, and the tensors
        whose memory it lists in items without an owner; each always in the same order. While the first are the same
        objects, and the memory of the second, and of the owners of all other items, is at the same addresses, `tensors`
        lists the same memory.
        """


@runtime_checkable
class HoldsWeights(Rooted, Protocol):
    """A State Provider whose tensors are weights, among others perhaps."""

    def weights(self) -> Sequence[TensorItem]:
        """Return those of `tensors` that are weights: of kind `model`."""


@runtime_checkable
class ChangedByForward(Protocol):
    """A State Provider of buffers, which a forward may change, so that a step's values must be kept by copies."""

    def live(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every buffer as it is now, under the name that `tensors` gives it."""


def is_looked_at(provider: StateProvider) -> bool:
    """Return whether the tensors in the objects of `provider` are figures that people look at, as a kind of tensors
    with the object's name: so they are unless the provider declares `is_looked_at = False`, as that of generators.
    """
    return bool(getattr(provider, "is_looked_at", True))


def read_at(provider: StateProvider) -> ReadAt:
    """Return when the objects of `provider` are to be read, "next_forward" where it declares nothing. SetupError for an
    unknown value.
    """
    declared: Any = getattr(provider, "read_at", "next_forward")
    if declared not in get_args(ReadAt):
        allowed = ", ".join(map(repr, get_args(ReadAt)))
        raise SetupError(f"{type(provider).__qualname__}.read_at is {declared!r}: it must be one of {allowed}")
    known: ReadAt = declared
    return known
