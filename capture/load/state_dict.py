"""Reads a checkpoint's tensors without a live target, whole and in their global shapes."""

from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from capture.load.assignments import Assignment, assign
from capture.load.read_into import read_into
from capture.load.rebuilt import RebuiltStep
from capture.state.dtypes import torch_dtype
from catalog.access.pins import pinned
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.nearest_names import nearest
from catalog.read.fragments import stored_tensors
from catalog.records import CheckpointRef, Extent

__all__ = ["StateDict", "state_dict_of"]

StateDict: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""`{kind: {name: tensor}}`"""


def state_dict_of(
    history: History,
    ref: CheckpointRef,
    *,
    names: str | Sequence[str] | None = None,
    kinds: str | Sequence[str] | None = None,
    rebuilt: RebuiltStep | None = None,
) -> StateDict:
    """Return the tensors of a checkpoint in host memory, as rank 0 has them; tied names share one tensor. With
    `rebuilt`, those of a step that was made again.

    `names` and `kinds` (glob patterns) choose, and only what is chosen is read. NotFoundError, with the nearest, for a
    pattern that fits nothing; CorruptError when bytes differ from their checksums or elements are missing.
    """
    names, kinds = _patterns("names", names), _patterns("kinds", kinds)
    with pinned(history.paths, ref if rebuilt is None else rebuilt.base):
        return _state_dict_of(history, ref, names=names, kinds=kinds, rebuilt=rebuilt)


def _state_dict_of(
    history: History,
    ref: CheckpointRef,
    *,
    names: Sequence[str] | None,
    kinds: Sequence[str] | None,
    rebuilt: RebuiltStep | None,
) -> StateDict:
    extents = history.state_extents(ref) if rebuilt is None else rebuilt.extents
    _check_patterns(ref, extents, names, kinds)
    # Chosen by key first: a tensor may be named by an alias that only some of its fragments carry, and a tensor that is
    # not asked for may be incomplete.
    wanted = {
        (extent.kind, extent.name)
        for extent in extents
        if _selected(extent.kind, kinds) and any(_selected(name, names) for name in (extent.name, *extent.aliases))
    }
    chosen = stored_tensors(extent for extent in extents if (extent.kind, extent.name) in wanted)
    state: StateDict = {}
    assignments: list[Assignment] = []
    for (kind, name), stored in sorted(chosen.items()):
        tensor = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
        assignments += assign(stored.fragments, tensor, start=0, numel=stored.numel)
        state.setdefault(kind, {}).update(dict.fromkeys((name, *stored.aliases), tensor))
    read_into(history.root, assignments, {} if rebuilt is None else rebuilt.kept())
    return state


def _patterns(argument: str, given: str | Sequence[str] | None) -> Sequence[str] | None:
    if given is None or isinstance(given, str):
        return None if given is None else [given]
    if not isinstance(given, (list, tuple, Set)) or not all(isinstance(pattern, str) for pattern in given):
        raise SetupError(f"{argument}={given!r}: give a pattern, or a list of patterns")
    return list(given)


def _check_patterns(
    ref: CheckpointRef, extents: Sequence[Extent], names: Sequence[str] | None, kinds: Sequence[str] | None
) -> None:
    known_kinds = {extent.kind for extent in extents}
    known_names = {
        name for extent in extents if _selected(extent.kind, kinds) for name in (extent.name, *extent.aliases)
    }
    for what, patterns, known in (("kind", kinds, known_kinds), ("tensor", names, known_names)):
        for pattern in patterns or ():
            if not any(fnmatchcase(value, pattern) for value in known):
                raise NotFoundError(
                    f"no {what} fits {pattern!r} in checkpoint {ref}; {nearest(pattern.strip('*?.'), known)}"
                )


def _selected(value: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(value, pattern) for pattern in patterns)
