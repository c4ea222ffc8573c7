"""Computes the statistics that trainings did not compute, and says of which checkpoints."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import pyarrow as pa

from catalog.access.pins import pinned
from catalog.data_files.data_files import data_file_bytes
from catalog.errors import NotFoundError, SetupError
from catalog.format.statistics_file import StatisticsFile
from catalog.history import History
from catalog.index import index
from catalog.paths import data_file
from catalog.records import CheckpointRef
from catalog.statistics.compute import analyze_part, missing_parts
from dshistory.display.formats import counted
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table

__all__ = ["analyze"]

_PATIENCE_S = 2.0
_SCHEMA: Final = pa.schema([("run", pa.string()), ("step", pa.int64()), ("bytes", pa.int64())])


def analyze(history: History, refs: Sequence[CheckpointRef], *, quiet: bool) -> Table:
    """See `Explorer.analyze`."""
    missing: dict[CheckpointRef, list[StatisticsFile]] = {}
    sizes: dict[CheckpointRef, int] = {}
    for ref in refs:
        # Beside a training that keeps only some of its checkpoints, any of these may be gone by its turn.
        with suppress(NotFoundError), pinned(history.paths, ref):
            missing[ref] = missing_parts(history.paths, ref)
            files = (data_file(ref.run, ref.step, part.rank) for part in missing[ref])
            sizes[ref] = sum(data_file_bytes(history.root, file) for file in files)
    wanted = [ref for ref, parts in missing.items() if parts]
    analyzed = []
    with ByteProgress(sum(sizes.values()), description=f"analyze {len(wanted)} checkpoints", quiet=quiet) as bar:
        for ref in wanted:
            with suppress(NotFoundError), pinned(history.paths, ref):
                _analyze(history, ref, missing[ref], bar)
                analyzed.append(ref)
    if analyzed:
        index.register(history.paths, patience_s=_PATIENCE_S)
    rows = [{"run": ref.run, "step": ref.step, "bytes": sizes[ref]} for ref in analyzed]
    note = _note(len(analyzed), len(missing) - len(wanted), len(refs))
    return Table(pa.Table.from_pylist(rows, schema=_SCHEMA), formats={"bytes": "bytes"}, note=note)


def _analyze(history: History, ref: CheckpointRef, parts: Sequence[StatisticsFile], bar: ByteProgress) -> None:
    for part in parts:
        try:
            analyze_part(history.paths, ref.run, part, progress=bar.advance)
        except OSError as error:
            raise SetupError(
                f"analyze: the statistics of {ref} cannot be written into {history.root}: {error.strerror}; "
                "free space, get write permission, or analyze a copy of the history"
            ) from error


def _note(computed: int, known: int, asked: int) -> str:
    if computed and known:
        return f"statistics of {counted(computed, 'checkpoint')} computed; {known} had them"
    if computed:
        return f"statistics of {counted(computed, 'checkpoint')} computed"
    if known:
        return f"nothing to compute: {counted(known, 'checkpoint')}, all with statistics"
    return f"nothing to compute: {counted(asked, 'checkpoint')}, removed meanwhile" if asked else "no checkpoint yet"
