"""The folders in which proofs work."""

import os
import tempfile
from pathlib import Path

from capture_helpers import make
from recorded_training import BUDGET_BYTES

import capture

__all__ = ["fast_folder", "measure_file_system"]


def fast_folder() -> Path:
    """Return a new folder, in memory where the machine has one: each state is a hundred files."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="dshistory-proofs-", dir=memory if os.access(memory, os.W_OK) else None))


def measure_file_system(folder: Path) -> None:
    """Let the writer measure the folder's file system, as it does once, so that no recorded session does."""
    model, optimizer = make(8)
    capture.enable(
        model, optimizer=optimizer, history=folder / "measured", backend="posix", budget_bytes=BUDGET_BYTES
    ).close()
