"""Reads the tensors of cells for which the catalog has no statistics, one checkpoint at a time.

Where their bytes are, and what these must hash to, the index says for many checkpoints at once: to parse the manifests
of each would take several times longer than to read a few tensors of it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from catalog.access.pins import pin
from catalog.disk.locks import free_lock
from catalog.errors import NotFoundError
from catalog.format.extents import SCHEMA, extent_records
from catalog.history import History
from catalog.read.fragments import StoredTensor, stored_tensors
from catalog.read.provider_tensors import state_only
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


_EXTENTS: Final = f"""
WITH wanted AS (SELECT unnest($kinds) AS kind, unnest($names) AS name),
     path AS (SELECT unnest($runs) AS run, unnest($steps) AS step)
SELECT run, step, {", ".join(f'"{name}"' for name in SCHEMA.names)}
FROM fragments JOIN path USING (run, step)
WHERE step BETWEEN $first AND $last
  AND (kind = 'object_tensor' OR (kind, name) IN (SELECT (kind, name) FROM wanted))
ORDER BY step, kind, name, start, file
"""
_AT_ONCE: Final = 20_000
"""The extents of about so many cells are asked for at once."""


class _Checkpoints:
    """The stored tensors of the wanted cells, asked for in ascending order of checkpoints, and the elements of those
    that are small. The latest two checkpoints that were asked for stay as they are, until the end of the context; of
    one that was removed before there are no tensors."""

    def __init__(self, history: History, refs: Sequence[CheckpointRef], keys: Sequence[Key], wanted: Wanted) -> None:
        self._history = history
        self._refs = refs
        self._numbers = {keys[tensor]: tensor for tensor in np.flatnonzero(wanted.any(axis=1)).tolist()}
        self._wanted = wanted
        self._at_once = max(2, _AT_ONCE // max(1, len(self._numbers)))
        self._known: dict[int, dict[int, StoredTensor]] = {}
        self._held: dict[int, Held] = {}
        self._pins: dict[int, int | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pin_only(())

    def held(self) -> Held:
        """Return the elements of the small fragments of the latest two checkpoints whose tensors were asked for."""
        return {extent: elements for held in self._held.values() for extent, elements in held.items()}

    def tensors(self, place: int) -> dict[int, StoredTensor]:
        """Return the tensors of the checkpoint at that place by their number."""
        self._pin_only((place - 1, place))
        if place not in self._known:
            self._known = self._stored(range(place, min(place + self._at_once, len(self._refs))))
        tensors = self._known[place] if place in self._pins else {}
        if place not in self._held:
            # The checkpoint before is kept, because an update needs it and it was just read.
            needed = np.flatnonzero(self._wanted[:, place : place + 2].any(axis=1)).tolist()
            held = read_small(self._history.root, (tensors[tensor] for tensor in needed if tensor in tensors))
            self._held = {kept: old for kept, old in self._held.items() if kept == place - 1} | {place: held}
        return tensors

    def _pin_only(self, places: Collection[int]) -> None:
        for place in self._pins.keys() - places:
            held = self._pins.pop(place)
            if held is not None:
                free_lock(held)
        for place in places:
            if place >= 0 and place not in self._pins:
                with suppress(NotFoundError):
                    self._pins[place] = pin(self._history.paths, self._refs[place])

    def _stored(self, places: range) -> dict[int, dict[int, StoredTensor]]:
        refs = [self._refs[place] for place in places]
        rows = self._history.query(
            _EXTENTS,
            {
                "kinds": [kind for kind, _ in self._numbers],
                "names": [name for _, name in self._numbers],
                "runs": [ref.run for ref in refs],
                "steps": [ref.step for ref in refs],
                "first": refs[0].step,
                "last": refs[-1].step,
            },
        )
        ends = np.searchsorted(rows["step"].to_numpy(), [ref.step for ref in refs], side="right").tolist()
        found: dict[int, dict[int, StoredTensor]] = {}
        for place, begin, end in zip(places, [0, *ends], ends, strict=False):
            stored = stored_tensors(extent_records(state_only(rows.slice(begin, end - begin))))
            found[place] = {self._numbers[key]: tensor for key, tensor in stored.items() if key in self._numbers}
        return found


def read_steps(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> Wanted:
    """Fill in the `parts` of the `wanted` cells that describe a tensor itself, and return which: all but those of
    checkpoints that were removed. Calls `advance` with the bytes read."""
    filled = np.zeros_like(wanted)
    with _Checkpoints(history, refs, keys, wanted) as checkpoints:
        for place, which in _by_place(wanted):
            tensors = checkpoints.tensors(place)
            held = checkpoints.held()
            for tensor in filter(tensors.__contains__, which):
                read = _compared_with_itself(history.root, tensors[tensor], advance, held)
                _fill(parts, _STEP_PARTS, (tensor, place), read)
                filled[tensor, place] = True
    return filled


def read_updates(
    history: History,
    refs: Sequence[CheckpointRef],
    keys: Sequence[Key],
    wanted: Wanted,
    parts: Mapping[str, Floats],
    advance: Advance,
) -> None:
    """Fill in the `parts` of the `wanted` cells that describe the way from the checkpoint before.

    The checkpoint before each wanted cell must have the tensor in the same shape, unless it was removed. Calls
    `advance` with the bytes read."""
    with _Checkpoints(history, refs, keys, wanted) as checkpoints:
        for place, which in _by_place(wanted):
            before, after = checkpoints.tensors(place - 1), checkpoints.tensors(place)
            held = checkpoints.held()
            for tensor in filter((before.keys() & after.keys()).__contains__, which):
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
