"""The rows that each file of a history adds to the catalog's tables, kept in memory once parsed.

Published files never change, so parsed rows stay right; a file is identified by its path, inode, size and time. The
rows of a checkpoint are remembered by its marker, which is published after all files that it names.

The rows are the same whether a query adds them to the index or registration inserts them, so an answer never depends on
what is registered. Rows of statistics also depend on the step before them, and those of a merged journal segment on
what the index has of it already: that, the `variant`, is part of the key.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog.errors import FormatError
from catalog.format.audit_file import read_audit
from catalog.format.journal import JOURNAL
from catalog.format.manifest import NOT_STATE
from catalog.format.segments import parse_segment, read_segment_rows
from catalog.index.schema import TABLES
from catalog.paths import HistoryPaths
from catalog.read.checkpoint import Checkpoint, read_checkpoint
from catalog.read.tensors import logical_tensors
from catalog.records import RunFacts
from catalog.statistics.updates import with_updates, without_updates

__all__ = [
    "RowCache",
    "Rows",
    "audit_rows",
    "checkpoint_rows",
    "run_rows",
    "segment_names",
    "segment_rows",
    "statistics_rows",
]

CACHE_BYTES = 512 << 20

Rows = Mapping[str, pa.Table]
"""Tables of the catalog with their new rows."""


class RowCache:
    """Parsed rows by file. When they take more than `limit_bytes`, the least recently used ones are dropped.
    Thread-safe."""

    def __init__(self, *, limit_bytes: int = CACHE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rows: OrderedDict[tuple[Any, ...], tuple[Rows, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: Path, parse: Callable[[], Rows], *, variant: Hashable = None) -> Rows:
        """Return the rows of the file at `path`, and call `parse` when they are not in the cache. `variant`
        is what the rows depend on besides the file, if anything. FileNotFoundError when there is no such file."""
        key = self._key(path, variant)
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
                return self._rows[key][0]
        # Outside the lock: two threads may parse the same file, but none waits for the other's disk.
        rows = parse()
        nbytes = sum(table.nbytes for table in rows.values())
        with self._lock:
            if key in self._rows:
                # Another thread was faster. Adding the rows again would count their bytes twice.
                return self._rows[key][0]
            self._rows[key] = (rows, nbytes)
            self._bytes += nbytes
            while self._bytes > self._limit_bytes and len(self._rows) > 1:
                self._bytes -= self._rows.popitem(last=False)[1][1]
        return rows

    def has(self, path: Path, *, variant: Hashable = None) -> bool:
        """Return whether `get` finds the rows without parsing."""
        with self._lock:
            return self._key(path, variant) in self._rows

    def _key(self, path: Path, variant: Hashable) -> tuple[Any, ...]:
        facts = path.lstat()
        return (str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns, variant)


def checkpoint_rows(paths: HistoryPaths, run: str, step: int) -> Rows:
    """Return the rows of a committed checkpoint. FormatError or MismatchError when one of its files can't be
    trusted."""
    checkpoint = read_checkpoint(paths, run, step)
    logical = logical_tensors(checkpoint, where=str(paths.step_dir(run, step)))
    state = logical.filter(pc.invert(pc.is_in(logical["kind"], pa.array(sorted(NOT_STATE)))))
    return {
        "checkpoints": _checkpoint(checkpoint, tensors=state.num_rows, nbytes=pc.sum(logical["nbytes"]).as_py() or 0),
        "tensors": _with_constants("tensors", {"run": run, "step": step}, state),
        "fragments": pa.concat_tables(
            _with_constants("fragments", {"run": run, "step": step, "rank": manifest.rank}, manifest.table)
            for manifest in checkpoint.manifests
        ),
    }


def statistics_rows(run: str, step: int, merged: pa.Table, *, before: tuple[int, pa.Table] | None) -> Rows:
    """Return the rows of a checkpoint's merged statistics. `before` is the closest earlier step with statistics, and
    its own merged statistics."""
    updated = without_updates(merged) if before is None else with_updates(merged, before[1], since=before[0])
    constant = {"run": run, "step": step}
    sketched = merged.filter(pc.greater(pc.list_value_length(merged["sketch"]), 0))
    return {
        "statistics": _with_constants("statistics", constant, updated),
        "sketches": _with_constants("sketches", constant, sketched),
        "analyses": _table("analyses", [constant]),
    }


def run_rows(facts: RunFacts) -> Rows:
    """Return the row of a run. FormatError when its time can't be parsed."""
    row = {
        "run": facts.run,
        "created": _instant(facts.created, where=f"run {facts.run}"),
        "world_size": facts.world_size,
        "parent_run": facts.parent_run,
        "parent_step": facts.parent_step,
        "layout": facts.layout_hash,
        "facts": json.dumps(facts.facts, sort_keys=True),
    }
    return {"runs": _table("runs", [row])}


def audit_rows(path: Path, *, run: str, step: int) -> Rows:
    """Return the rows of an audit file. FormatError when it can't be trusted."""
    constant = {"run": run, "step": step}
    return {
        "audit": _with_constants("audit", constant, read_audit(path, run=run)),
        "audits": _table("audits", [{"run": run, "audit": path.name}]),
    }


def segment_rows(path: Path, *, run: str, spans: Sequence[tuple[int, int]]) -> Rows:
    """Return the rows of a journal segment that were published under the numbers of these spans. FormatError when it
    can't be trusted."""
    table, counts = read_segment_rows(path, JOURNAL, run=run)
    segment = parse_segment(path.name)
    if segment is not None and list(spans) != [(segment.first, segment.last)]:
        ends = np.concatenate([[0], np.cumsum(counts)])
        at = [(ends[first - segment.first], ends[last + 1 - segment.first]) for first, last in spans]
        table = pa.concat_tables([table.slice(begin, end - begin) for begin, end in at])
    columns = {name: table[name] for name in table.schema.names}
    columns["run"] = pa.array([run]).take(pa.nulls(table.num_rows, pa.int64()).fill_null(0))
    columns["rank"] = columns["rank"].cast(pa.int64())
    schema = TABLES["journal"]
    return {"journal": pa.table({name: columns[name] for name in schema.names}, schema=schema)}


def segment_names(run: str, name: str) -> Rows:
    """Return the row that says that the index has all rows of a journal segment."""
    return {"segments": _table("segments", [{"run": run, "segment": name}])}


def _checkpoint(checkpoint: Checkpoint, *, tensors: int, nbytes: int) -> pa.Table:
    marker = checkpoint.marker
    row = {
        "run": marker.run,
        "step": marker.step,
        "created": max(manifest.created for manifest in checkpoint.manifests),
        "world_size": marker.world_size,
        "layout": marker.layout_hash,
        "tensors": tensors,
        "bytes": nbytes,
        "new_bytes": sum(part.data_bytes for part in marker.parts),
    }
    return _table("checkpoints", [row])


def _with_constants(name: str, constant: Mapping[str, Any], rows: pa.Table) -> pa.Table:
    """Return `rows` with the columns of a table of the catalog; each value of `constant` fills its column."""
    columns = []
    for field in TABLES[name]:
        if field.name in constant:
            column = pa.repeat(pa.scalar(constant[field.name], field.type), rows.num_rows)
        else:
            column = rows[field.name]
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.table(columns, schema=TABLES[name])


def _table(name: str, rows: Any) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=TABLES[name])


def _instant(text: str, *, where: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: field created: {text!r} is not an ISO 8601 date and time") from error
    if instant.tzinfo is None:
        raise FormatError(f"{where}: field created: {text!r} has no time zone")
    return instant
