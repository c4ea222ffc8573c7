"""The choices of a training that would have to wait because too much is still being written."""

from typing import Literal

__all__ = ["OnFull"]

OnFull = Literal["wait", "skip"]
"""The training waits, or leaves a step out: of the snapshots where the step is due, and of the redo log."""
