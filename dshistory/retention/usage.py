"""Adds up what a history takes on the disk, by run, kind and checkpoint, and what the removal of each would free."""

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from catalog.history import History
from catalog.retention.facts import CheckpointFacts, FactsReader, bytes_on_disk
from dshistory.display.formats import Format
from dshistory.display.report import Report
from dshistory.display.table import Table
from dshistory.display.text import Layout

__all__ = ["usage"]

_FORMATS: Final[dict[str, Format]] = dict.fromkeys(
    ("bytes", "index", "frees", "referred", "derived", "redo", "other"), "bytes"
)
_LAYOUT: Final = Layout(gives_way=("other",))
_RUNS: Final = pa.schema(
    [(name, pa.string() if name == "run" else pa.int64()) for name in ("run", "checkpoints", "bytes", "redo", "other")]
)
_CHECKPOINTS: Final = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("bytes", pa.int64()),
        ("frees", pa.int64()),
        ("needed_by", pa.int64()),
        ("needs", pa.list_(pa.int64())),
    ]
)
_KINDS: Final = """
SELECT run, kind, coalesce(sum(nbytes) FILTER (is_raw AND own), 0)::BIGINT AS bytes,
    coalesce(sum(nbytes) FILTER (is_raw AND NOT own), 0)::BIGINT AS referred,
    coalesce(sum(nbytes) FILTER (NOT is_raw), 0)::BIGINT AS derived
FROM (
    SELECT run, kind, nbytes, codec = 'raw' AS is_raw,
        starts_with(file, format('runs/{}/steps/{:012d}/', run, step)) AS own
    FROM fragments
)
WHERE run IN (SELECT unnest($runs)) GROUP BY run, kind ORDER BY run, bytes DESC
"""


def usage(history: History, *, run: str | None) -> Report:
    """See `Explorer.usage`."""
    reader = FactsReader(history)
    runs = [facts.run for facts in history.runs()] if run is None else [run]
    lines = {name: reader.line(name) for name in runs}
    rows = [_run_row(history, name, line) for name, line in lines.items()]
    of_runs = sum(bytes_on_disk(history.paths.run_dir(name)) for name in runs)
    total = {"bytes": of_runs}
    if run is None:
        nbytes = bytes_on_disk(history.root)
        total = {"bytes": nbytes, "index": max(0, nbytes - of_runs)}
    facts = {**total, "checkpoints": sum(map(len, lines.values()))}
    tables = {
        "runs": Table(pa.Table.from_pylist(rows, schema=_RUNS), formats=_FORMATS, layout=_LAYOUT),
        "kinds": Table(history.query(_KINDS, {"runs": runs}), formats=_FORMATS),
        "checkpoints": Table(_checkpoints(lines), formats=_FORMATS),
    }
    return Report(f"usage of {history.root}", facts, tables, _FORMATS)


def _run_row(history: History, run: str, line: Sequence[CheckpointFacts]) -> dict[str, object]:
    own = sum(one.nbytes for one in line)
    redo = bytes_on_disk(history.paths.redo_dir(run))
    other = max(0, bytes_on_disk(history.paths.run_dir(run)) - own - redo)
    return {"run": run, "checkpoints": len(line), "bytes": own, "redo": redo, "other": other}


def _checkpoints(lines: Mapping[str, Sequence[CheckpointFacts]]) -> pa.Table:
    rows = []
    for line in lines.values():
        needed_by = {one.ref: [other.ref for other in line if one.ref in other.needs] for one in line}
        rows += [
            {
                "run": one.ref.run,
                "step": one.ref.step,
                "bytes": one.nbytes,
                "frees": 0 if needed_by[one.ref] else one.nbytes,
                "needed_by": len(needed_by[one.ref]),
                "needs": sorted(needed.step for needed in one.needs),
            }
            for one in line
        ]
    return pa.Table.from_pylist(rows, schema=_CHECKPOINTS)
