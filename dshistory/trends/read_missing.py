"""Reads the tensors of cells for which the catalog has no statistics, one checkpoint at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.history import History
from catalog.read.fragments import StoredTensor, stored_tensors
from catalog.records import CheckpointRef
from dshistory.comparison.diff import compare
from dshistory.comparison.sums import Comparison
from dshistory.metrics import Floats
from dshistory.tensors.stream import FragmentStream, Held, read_small
from dshistory.trends.statistics_matrix import Key

__all__ = ["READABLE", "read_steps", "read_updates"]

_STEP_PARTS: Final[Mapping[str, Callable[[Comparison], float]]] = {
    "squares": lambda compared: compared.after_squares,
    "nonfinite": lambda compared: compared.nonfinite_after,
}
_UPDATE_PARTS: Final[Mapping[str, Callable[[Comparison], float]]] = {
    "update_squares": lambda compared: compared.update_squares,
    "before_squares": lambda compared: compared.before_squares,
    "squares": lambda compared: compared.after_squares,
    "dot": lambda compared: compared.dot,
    "max_change": lambda compared: compared.max_change,
    "changed": lambda compared: compared.changed,
    "sign_flips": lambda compared: compared.sign_flips,
    "numel": lambda compared: compared.numel,
}
_COUNTED: Final = frozenset({"nonfinite", "changed", "numel"})
"""Parts that are known also where no element is finite."""

READABLE: Final = frozenset(_STEP_PARTS)
"""The parts for which a tensor without statistics is read."""

Wanted = npt.NDArray[np.bool_]
Advance = Callable[[int], None]


class _Checkpoints:
    """The stored tensors of the wanted cells, one checkpoint at a time, and the elements of those that are small.

    The latest two are kept, because an update needs the one before, which was just read.
    """

    def __init__(self, history: History, refs: Sequence[CheckpointRef], keys: Sequence[Key], wanted: Wanted) -> None:
        self._history = history
        self._refs = refs
        self._numbers = {keys[tensor]: tensor for tensor in np.flatnonzero(wanted.any(axis=1)).tolist()}
        self._wanted = wanted
        self._kept: dict[int, dict[int, StoredTensor]] = {}
        self._held: dict[int, Held] = {}

    def held(self) -> Held:
        """Return the elements of the small fragments of the latest two checkpoints whose tensors were asked for."""
        return {extent: elements for held in self._held.values() for extent, elements in held.items()}

    def tensors(self, place: int) -> dict[int, StoredTensor]:
        """Return the tensors of the checkpoint at that place by their number."""
        if place not in self._kept:
            names, kinds = {name for _, name in self._numbers}, {kind for kind, _ in self._numbers}
            extents = self._history.state_extents(self._refs[place], names=sorted(names), kinds=sorted(kinds))
            found = stored_tensors(extents)
            tensors = {self._numbers[key]: tensor for key, tensor in found.items() if key in self._numbers}
            needed = np.flatnonzero(self._wanted[:, place : place + 2].any(axis=1)).tolist()
            held = read_small(self._history.root, (tensors[tensor] for tensor in needed if tensor in tensors))
            self._kept = {kept: old for kept, old in self._kept.items() if kept == place - 1} | {place: tensors}
            self._held = {kept: old for kept, old in self._held.items() if kept == place - 1} | {place: held}
        return self._kept[place]


def read_steps(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> None:
    """Fill in the `parts` of the `wanted` cells that describe a tensor itself; calls `advance` with the bytes read."""
    checkpoints = _Checkpoints(history, refs, keys, wanted)
    for place, which in _by_place(wanted):
        tensors = checkpoints.tensors(place)
        held = checkpoints.held()
        for tensor in which:
            read = _compared_with_itself(history.root, tensors[tensor], advance, held)
            _fill(parts, _STEP_PARTS, (tensor, place), read)


def read_updates(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> None:
    """Fill in the `parts` of the `wanted` cells that describe the way from the checkpoint before.

    The checkpoint before each wanted cell must have the tensor in the same shape. Calls `advance` with the bytes
    read."""
    checkpoints = _Checkpoints(history, refs, keys, wanted)
    for place, which in _by_place(wanted):
        before, after = checkpoints.tensors(place - 1), checkpoints.tensors(place)
        held = checkpoints.held()
        for tensor in which:
            read = compare(history.root, before[tensor], after[tensor], advance, held=held)
            _fill(parts, _UPDATE_PARTS, (tensor, place), read)


def _by_place(wanted: Wanted) -> Iterator[tuple[int, list[int]]]:
    """Yield the place of each checkpoint with the numbers of its wanted tensors."""
    for place in np.flatnonzero(wanted.any(axis=0)).tolist():
        yield place, np.flatnonzero(wanted[:, place]).tolist()


def _fill(
    parts: Mapping[str, Floats],
    of_comparison: Mapping[str, Callable[[Comparison], float]],
    cell: tuple[int, int],
    read: Comparison,
) -> None:
    for part, values in parts.items():
        known = read.finite or not read.numel or part in _COUNTED
        values[cell] = of_comparison[part](read) if known else math.nan


def _compared_with_itself(root: Path, tensor: StoredTensor, advance: Advance, held: Held) -> Comparison:
    """Compare a tensor with itself, which gives the sums of one step."""
    comparison = Comparison()
    stream = FragmentStream(root, tensor, held=held)
    while numel := stream.ready():
        part = stream.take(numel)
        comparison.add(part, part)
        advance(part.nbytes)
    return comparison
