"""Warns of objects that a checkpoint has and that no provider of a restore takes, left out knowingly or by mistake."""

from collections.abc import Iterator, Mapping
from typing import Any

from capture.user_warning import warn_user
from catalog.records import CheckpointRef

__all__ = ["TrackedObjects", "warn_of_unclaimed"]

_ARGUMENTS = {
    "lr_scheduler": "scheduler",
    "loss_scaler": "scaler",
    "dataloader": "dataloader",
    "optimizer": "optimizer",
}
"""The argument of `restore` by which each object finds a provider that takes it."""

_INFORMATION = {"buffers", "trainer"}
"""Objects that a restore does not need; a Trainer goes on from a folder that is written for it."""


class TrackedObjects(Mapping[str, Any]):
    """A checkpoint's objects; remembers which of them were asked for."""

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

    def unclaimed(self) -> list[str]:
        """Return the names that were never asked for, sorted."""
        return sorted(self._objects.keys() - self._asked - _INFORMATION)


def warn_of_unclaimed(ref: CheckpointRef, objects: TrackedObjects) -> None:
    """Warn once of the objects that are not put back, and name the arguments to pass for them."""
    names = objects.unclaimed()
    if names:
        arguments = ", ".join(dict.fromkeys(f"{_ARGUMENTS.get(name, 'providers')}=" for name in names))
        warn_user(
            f"checkpoint {ref} also has {', '.join(names)}, which nothing here takes, so it is not put back: "
            f"pass {arguments} to restore that too"
        )
