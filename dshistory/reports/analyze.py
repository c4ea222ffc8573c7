"""Compute the statistics that trainings did not compute."""

from collections.abc import Sequence

from catalog.errors import SetupError
from catalog.history import History
from catalog.index import index
from catalog.records import CheckpointRef
from catalog.statistics.compute import analyze_part, missing_parts
from dshistory.display.progress import ByteProgress

__all__ = ["analyze"]

_PATIENCE_S = 2.0


def analyze(history: History, refs: Sequence[CheckpointRef], *, quiet: bool) -> int:
    """Compute the missing statistics of the checkpoints; return how many lacked some.

    After an interruption the statistics computed so far are kept. Raises SetupError when they cannot be written."""
    parts = {ref: missing_parts(history.paths, ref) for ref in refs}
    missing = {ref: found for ref, found in parts.items() if found}
    total = sum(
        history.paths.data(ref.run, ref.step, part.rank).stat().st_size
        for ref, found in missing.items()
        for part in found
    )
    with ByteProgress(total, description=f"analyze {len(missing)} checkpoints", quiet=quiet) as bar:
        for ref, found in missing.items():
            for part in found:
                try:
                    analyze_part(history.paths, ref.run, part, progress=bar.advance)
                except OSError as error:
                    raise SetupError(
                        f"analyze: the statistics of {ref} cannot be written into {history.root}: {error.strerror}; "
                        "free space, get write permission, or analyze a copy of the history"
                    ) from error
    if missing:
        index.register(history.paths, patience_s=_PATIENCE_S)
    return len(missing)
