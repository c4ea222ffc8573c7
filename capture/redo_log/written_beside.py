"""Finds what has written the tensors of an update beside the update: torch counts the writes to each tensor.

Between two updates everything that an update writes is compared. Of an update of flat tensors, which may be several
calls of the optimizer, what one of them is about to read is compared too, with what was there when the update began or
a call had ended: hooks of the inner optimizer, and what somebody has put around its step, run in between.
"""

from collections.abc import Sequence

import torch

from capture.redo_log.updated_tensors import UpdatedTensors
from capture.state.optimizer_state import state_tensors

__all__ = ["WrittenBeside"]

_Version = tuple[int, float]


class WrittenBeside:
    """Knows which writes belong to an update of `optimizer`, and tells of others."""

    def __init__(self, optimizer: torch.optim.Optimizer, updated: UpdatedTensors) -> None:
        self._optimizer = optimizer
        self._updated = updated
        self._around: dict[str, _Version] = {}
        self._called: Sequence[torch.Tensor] = ()
        self._versions = self._read()

    def forget(self) -> None:
        """Let everything that was written so far belong to an update."""
        self._versions = self._read()

    def since_the_update(self) -> str | None:
        """Return what was written since `forget` was called last; None for nothing."""
        now = self._read()
        if now == self._versions:
            return None
        names = sorted(name for name in now | self._versions if now.get(name) != self._versions.get(name))
        return (
            f"{names[0]} and {len(names) - 1} more were written outside the update"
            if names[1:]
            else (f"{names[0]} was written outside the update")
        )

    # Within an update of flat tensors.

    def update_begins(self) -> None:
        """An update begins, with everything as it is now."""
        self._around = self._versions_of(self._updated.all) if self._updated.are_flat else {}

    def call_begins(self, called: Sequence[torch.Tensor]) -> None:
        """A call of the optimizer is about to write these tensors."""
        self._called = called

    def call_ended(self) -> None:
        """Let what was written since the call has begun belong to it."""
        self._around.update(self._versions_of(self._called))

    def between_calls(self, written: Sequence[torch.Tensor]) -> str | None:
        """Return what was written of flat tensors and their state since the update has begun, or the last call that
        writes them has ended; None for nothing."""
        now = self._versions_of(written) if self._updated.are_flat else {}
        changed = sorted(name for name, version in now.items() if self._around.get(name) != version)
        return f"{changed[0]} was written within its update, as by a hook of its optimizer" if changed else None

    def _read(self) -> dict[str, _Version]:
        """Return the identity and the version of every tensor that an update writes."""
        found = {name: _version(one) for name, one in self._updated.held}
        if self._updated.are_flat:
            return found | self._versions_of(self._updated.all)
        _, tensors = state_tensors(self._optimizer.state.values())
        found.update({f"optimizer state {i}": _version(one) for i, one in enumerate(tensors)})
        return found

    def _versions_of(self, flats: Sequence[torch.Tensor]) -> dict[str, _Version]:
        """Return the identity and the version of flat tensors, and those of their state, or its value for a number."""
        found = {}
        for flat in flats:
            name = self._updated.known_name(flat)
            found[name] = _version(flat)
            for key, value in self._optimizer.state.get(flat, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{key} of {name}"] = _version(value)
                elif isinstance(value, (int, float)):
                    found[f"{key} of {name}"] = 0, value
        return found


def _version(tensor: torch.Tensor) -> _Version:
    """Return the identity and the version of a tensor; one made in inference mode counts no writes."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version
