"""Which checkpoints a path holds, of which format each is, and which step: by names alone, before anything is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from catalog.errors import NotFoundError, SetupError
from dshistory.conversion.importing.foreign_checkpoint import Reader

__all__ = ["Place", "places_of", "step_in"]

_STEP: Final = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration|epoch)s?[-_=]?0*(\d+)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"0*(\d+)")


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint; `step` as its name says it, None when the name has no number that is one."""

    path: Path
    format: str
    step: int | None


def places_of(path: Path, readers: Mapping[str, Reader], *, format: str | None) -> list[Place]:
    """The checkpoint at `path`, or the ones in it, by step. Readers are asked in order, the first that recognises one reads it.

    NotFoundError when there is none; SetupError for an unknown format."""
    if format is not None and format not in readers:
        raise SetupError(f"there is no format {format!r}; the formats are {', '.join(readers)}")
    chosen = readers if format is None else {format: readers[format]}
    if not path.exists():
        raise NotFoundError(f"nothing to import at {path}: it does not exist")
    children = sorted(path.iterdir()) if path.is_dir() else []
    inside = [place for child in children for place in [_place(child, chosen)] if place is not None]
    # First, for a trainer leaves its last weights beside the folders of its steps.
    steps = [place for place in inside if place.step is not None and place.path.is_dir()]
    found = _place(path, chosen)
    if steps:
        inside = steps
    elif found is not None:
        return [found]
    if not inside:
        raise NotFoundError(
            f"nothing to import at {path}: neither it nor anything directly in it is a checkpoint of the formats "
            f"{', '.join(chosen)}"
        )
    return sorted(inside, key=lambda place: (-1 if place.step is None else place.step, place.path))


def step_in(name: str) -> int | None:
    """The step that a file's or folder's name states: global_step123, checkpoint-500, model_step_10.pt, 000200."""
    stem = name.split(".", 1)[0]
    match = _STEP.search(stem) or _NUMBER.fullmatch(stem)
    return int(match[1]) if match else None


def _place(path: Path, readers: Mapping[str, Reader]) -> Place | None:
    for name, reader in readers.items():
        if reader.recognises(path):
            return Place(path, name, step_in(path.name))
    return None
