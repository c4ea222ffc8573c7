"""What a checkpoint has that nobody takes at a restore: left out knowingly or by mistake, it is said."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from catalog.records import CheckpointRef

__all__ = ["Asked", "warn_of_untaken"]

_ARGUMENTS = {
    "lr_scheduler": "scheduler",
    "loss_scaler": "scaler",
    "dataloader": "dataloader",
    "optimizer": "optimizer",
}
"""The argument by which each object finds somebody who takes it."""

_INFORMATION = {"buffers"}
"""Objects that a restore does not need."""


class Asked(Mapping[str, Any]):
    """A checkpoint's objects, and which of them anybody has asked for."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def untaken(self) -> list[str]:
        """The names that nobody has asked for."""
        return sorted(self._objects.keys() - self._asked - _INFORMATION)


def warn_of_untaken(ref: CheckpointRef, objects: Asked) -> None:
    """Say once what of a checkpoint is not put back, and what to pass for it."""
    names = objects.untaken()
    if names:
        arguments = ", ".join(dict.fromkeys(f"{_ARGUMENTS.get(name, 'providers')}=" for name in names))
        warnings.warn(
            f"checkpoint {ref} also has {', '.join(names)}, which nobody here takes, so it is not put back: pass {arguments} "
            "to restore that too",
            stacklevel=4,
        )
