"""The cells of a trajectory that the catalog can't tell: the tensors are read, checkpoint by checkpoint."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.history import History
from catalog.records import CheckpointRef
from dshistory.comparison.diff import compare
from dshistory.comparison.sums import Comparison
from dshistory.metrics import Floats
from dshistory.tensors.stream import FragmentStream, StoredTensor, stored_tensors
from dshistory.trends.statistics_matrix import Key

__all__ = ["READABLE", "read_moves", "read_steps"]

_OF_A_STEP: Final[Mapping[str, Callable[[Comparison], float]]] = {
    "squares": lambda of: of.squares_after,
    "nonfinite": lambda of: of.nonfinite_after,
}
_OF_A_MOVE: Final[Mapping[str, Callable[[Comparison], float]]] = {
    "update_squares": lambda of: of.squares_update,
    "before_squares": lambda of: of.squares_before,
    "squares": lambda of: of.squares_after,
    "dot": lambda of: of.dot,
    "max_change": lambda of: of.max_change,
    "changed": lambda of: of.changed,
    "sign_flips": lambda of: of.sign_flips,
    "numel": lambda of: of.numel,
}
_COUNTED: Final = frozenset({"nonfinite", "changed", "numel"})
"""Known also where no element is finite; the rest is not."""

READABLE: Final = frozenset(_OF_A_STEP)
"""What a tensor is read for where there are no statistics of it."""

Wanted = npt.NDArray[np.bool_]
Advance = Callable[[int], None]


class _Place:
    """Tensors of one checkpoint at a time, by their key."""

    def __init__(self, history: History, refs: Sequence[CheckpointRef], keys: Sequence[Key]) -> None:
        self._history = history
        self._refs = refs
        self._keys = keys

    def tensors(self, place: int, which: Iterable[int]) -> dict[int, StoredTensor]:
        """The tensors, by their number, of the checkpoint at that place."""
        wanted = {self._keys[tensor]: tensor for tensor in which}
        names, kinds = {name for _, name in wanted}, {kind for kind, _ in wanted}
        extents = self._history.extents(self._refs[place], names=sorted(names), kinds=sorted(kinds))
        return {wanted[key]: found for key, found in stored_tensors(extents).items() if key in wanted}


def read_steps(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> None:
    """Fill in the parts of the wanted cells: of the tensor itself."""
    at = _Place(history, refs, keys)
    for place, which in _by_place(wanted):
        for tensor, found in at.tensors(place, which).items():
            _fill(parts, _OF_A_STEP, (tensor, place), _alone(history.root, found, advance))


def read_moves(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> None:
    """Fill in the parts of the wanted cells: of the way from the checkpoint before, which has a tensor of that shape."""
    at = _Place(history, refs, keys)
    for place, which in _by_place(wanted):
        before, after = at.tensors(place - 1, which), at.tensors(place, which)
        for tensor in which:
            read = compare(history.root, before[tensor], after[tensor], advance)
            _fill(parts, _OF_A_MOVE, (tensor, place), read)


def _by_place(wanted: Wanted) -> Iterator[tuple[int, list[int]]]:
    """Each checkpoint's place with the numbers of its wanted tensors."""
    for place in np.flatnonzero(wanted.any(axis=0)).tolist():
        yield place, np.flatnonzero(wanted[:, place]).tolist()


def _fill(
    parts: Mapping[str, Floats],
    figures: Mapping[str, Callable[[Comparison], float]],
    cell: tuple[int, int],
    read: Comparison,
) -> None:
    for part, cells in parts.items():
        known = read.finite or not read.numel or part in _COUNTED
        cells[cell] = figures[part](read) if known else math.nan


def _alone(root: Path, tensor: StoredTensor, advance: Advance) -> Comparison:
    """The tensor compared with itself: what can be said of one step."""
    comparison = Comparison()
    stream = FragmentStream(root, tensor)
    while numel := stream.ready():
        part = stream.take(numel)
        comparison.add(part, part)
        advance(part.nbytes)
    return comparison
