"""Filling in the statistics that trainings had no time for."""

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
    """Compute the statistics of those checkpoints that lack some; how many did. Interrupted, what is done is kept.
    SetupError where they can't be written."""
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
                        f"analyze: the statistics of {ref} can't be written into {history.root}: {error.strerror}; analyze a copy of the "
                        "history, or where there is room and it may be written"
                    ) from error
    if missing:
        index.register(history.paths, patience_s=_PATIENCE_S)
    return len(missing)
