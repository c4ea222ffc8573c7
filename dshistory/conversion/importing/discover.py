"""Finds the checkpoints at a path, with the format and step of each, by names alone: nothing is read yet."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from catalog.errors import NotFoundError, SetupError
from dshistory.conversion.importing.foreign_checkpoint import Reader

__all__ = ["Candidate", "discover", "step_in"]

_STEP: Final = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration|epoch)s?[-_=]?0*(\d+)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"0*(\d+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that was found; `step` is the one in its name, None when the name states none."""

    path: Path
    format: str
    step: int | None


def discover(path: Path, readers: Mapping[str, Reader], *, format: str | None) -> list[Candidate]:
    """Return the checkpoint at `path`, or those directly in it by step; the first reader that recognises one reads it.

    Raises NotFoundError when there is none, SetupError for an unknown format."""
    if format is not None and format not in readers:
        raise SetupError(f"there is no format {format!r}; the formats are {', '.join(readers)}")
    chosen = readers if format is None else {format: readers[format]}
    if not path.exists():
        raise NotFoundError(f"nothing to import at {path}: it does not exist")
    children = sorted(path.iterdir()) if path.is_dir() else []
    inside = [found for child in children for found in [_candidate(child, chosen)] if found is not None]
    # Folders of steps go first, because a trainer leaves its last weights beside them.
    steps = [one for one in inside if one.step is not None and one.path.is_dir()]
    found = _candidate(path, chosen)
    # A Trainer's checkpoint has DeepSpeed's inside, as global_step500 in checkpoint-500, and is the whole of it.
    if steps and not (found is not None and found.step == steps[0].step and len(steps) == 1):
        inside = steps
    elif found is not None:
        return [found]
    if not inside:
        raise NotFoundError(
            f"nothing to import at {path}: neither it nor anything directly in it is a checkpoint of the formats "
            f"{', '.join(chosen)}"
        )
    return sorted(inside, key=lambda one: (-1 if one.step is None else one.step, one.path))


def step_in(name: str) -> int | None:
    """Return the step in the name of a file or folder: global_step123, checkpoint-500, model_step_10.pt, 000200."""
    stem = name.split(".", 1)[0]
    match = _STEP.search(stem) or _NUMBER.fullmatch(stem)
    return int(match[1]) if match else None


def _candidate(path: Path, readers: Mapping[str, Reader]) -> Candidate | None:
    for name, reader in readers.items():
        if reader.recognises(path):
            return Candidate(path, name, step_in(path.name))
    return None
