"""The audits of a whole run, each known step against the one before it, stored beside the run as the table `audit`.

An audit is stored as soon as it is there, so a call that ends early, however it ends, goes on where it stopped. Stored
audits are derived: without them nothing is lost but the time to compute them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from capture.redo.rebuild import RebuiltSteps
from catalog.errors import HistoryError, NotFoundError, SetupError
from catalog.format.audit_file import publish_audit
from catalog.history import History
from catalog.index import index
from catalog.read.redo import recorded_steps
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.causes.audit import audit
from dshistory.display.formats import counted
from dshistory.display.progress import CountProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.tensors.checkpoint_tensors import MadeAgain

__all__ = ["AuditsTable", "audit_all"]

_SQL: Final = """
SELECT run, step, any_value(since) AS since, count(*) AS parameters, count(cause) AS unbalanced,
       arg_max(name, over_bound) FILTER (cause IS NOT NULL) AS worst,
       arg_max(cause, over_bound) FILTER (cause IS NOT NULL) AS cause,
       sqrt(sum(gradient_norm * gradient_norm)) AS gradient_norm
FROM audit WHERE list_contains($runs, run) GROUP BY run, step
"""
_LAYOUT: Final = Layout(in_title=("run",), gives_way=("run", "parameters", "since"))
_PATIENCE_S: Final = 2.0


class AuditsTable(Table):
    """A row for each audited step, in the order of the lineage; see `Explorer.audit_all`."""


def audit_all(history: History, *, run: str | None, redo: bool, quiet: bool) -> AuditsTable:
    """See `Explorer.audit_all`."""
    refs = committed_lineage(history.paths, run)
    if redo:
        refs = _with_recorded_steps(history, refs)
    if len(refs) < 2:
        raise NotFoundError(f"audit_all: {counted(len(refs), 'checkpoint')}, so there are none to compare")
    known = _stored(history, refs)
    missing = [
        (before, after) for before, after in pairwise(refs) if after not in known or known[after]["since"] < before.step
    ]
    failed: dict[CheckpointRef, HistoryError] = {}
    with (
        RebuiltSteps(history) as behind,
        RebuiltSteps(history) as ahead,
        CountProgress(len(missing), description=f"audit {counted(len(missing), 'step')}", quiet=quiet) as bar,
    ):
        for before, after in missing:
            try:
                _store(history, before, after, made_again=(behind.make, ahead.make))
            except HistoryError as error:
                failed[after] = error
                if len(failed) == len(missing):
                    raise
            bar.advance(1)
    index.register(history.paths, patience_s=_PATIENCE_S)
    found = _stored(history, refs)
    rows = pa.Table.from_pylist([found[ref] for ref in refs if ref in found], schema=_schema())
    return AuditsTable(rows, note=_note(rows, len(missing) - len(failed), failed), layout=_LAYOUT)


def _with_recorded_steps(history: History, refs: Sequence[CheckpointRef]) -> list[CheckpointRef]:
    """Return these checkpoints, of one lineage, and all steps between them that a redo log has."""
    found = set(refs)
    for run in dict.fromkeys(ref.run for ref in refs):
        first, last = (pick(ref.step for ref in refs if ref.run == run) for pick in (min, max))
        found |= {CheckpointRef(run, step) for step in recorded_steps(history.paths, run) if first < step < last}
    return sorted(found, key=lambda ref: ref.step)


def _store(history: History, before: CheckpointRef, after: CheckpointRef, *, made_again: Sequence[MadeAgain]) -> None:
    rows = audit(history, before, after, names="*", quiet=True, made_again=made_again).to_arrow()
    since = pa.repeat(pa.scalar(before.step, pa.int64()), rows.num_rows)
    try:
        publish_audit(history.paths, after.run, after.step, rows.append_column("since", since))
    except OSError as error:
        raise SetupError(
            f"audit_all: the audit of {after} cannot be written into {history.root}: {error.strerror}; free space or "
            f"get write permission; h.audit({before.step}, {after.step}) needs neither"
        ) from error


def _stored(history: History, refs: Sequence[CheckpointRef]) -> dict[CheckpointRef, Mapping[str, Any]]:
    """Return the audits that are there, each in one row, by the step that was audited, against the nearest one."""
    rows = history.query(_SQL, {"runs": sorted({ref.run for ref in refs})}).to_pylist()
    return {CheckpointRef(row["run"], row["step"]): row for row in rows}


def _schema() -> pa.Schema:
    text, whole = pa.string(), pa.int64()
    return pa.schema(
        [
            ("run", text),
            ("step", whole),
            ("since", whole),
            ("parameters", whole),
            ("unbalanced", whole),
            ("worst", text),
            ("cause", text),
            ("gradient_norm", pa.float64()),
        ]
    )


def _note(rows: pa.Table, computed: int, failed: Mapping[CheckpointRef, HistoryError]) -> str:
    unbalanced = int(pc.sum(pc.greater(rows["unbalanced"], 0)).as_py() or 0)
    parts = [f"{unbalanced} of {counted(rows.num_rows, 'step')} do not balance", f"{computed} audited now"]
    if failed:
        ref, error = next(iter(failed.items()))
        parts.append(f"{len(failed)} could not be audited, the first, {ref}: {error}")
    return "; ".join(parts)
