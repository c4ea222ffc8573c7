"""Refuses to go on with a training from a checkpoint that was captured to be looked at only."""

from catalog.errors import MismatchError
from catalog.history import History
from catalog.records import CheckpointRef

__all__ = ["require_whole_state"]


def require_whole_state(history: History, ref: CheckpointRef) -> None:
    """Raise MismatchError for a checkpoint without the state that a training needs to go on."""
    held = history.run_facts(ref.run).holds
    if held:
        raise MismatchError(
            f"checkpoint {ref} holds {held}, without optimizer state, learning rate schedule, counters and random "
            'numbers, so no training can go on from it: capture with capture.enable(..., what="state"), the default, '
            f"for that; dshistory.restore({str(ref)!r}) returns its weights as a state dict"
        )
