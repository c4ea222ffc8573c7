"""The findings of an audit: whose books do not balance between two checkpoints, and what kind of cause that is.

Every sentence of `audit` is a kind. State that was reset is told from state that came from elsewhere by its size: after
k updates from zero, a second moment is (1 - b2^k) times the squares of usual gradients.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from catalog.records import CheckpointRef
from dshistory.causes.audit import AuditTable, audit
from dshistory.causes.findings import Finding, named
from dshistory.causes.record import Record

__all__ = ["audit_findings"]

_KINDS: Final = (
    ("not finite", "not finite"),
    ("optimizer state reset", "optimizer state reset"),
    ("optimizer state from elsewhere", "foreign optimizer state"),
    ("second moment", "foreign optimizer state"),
    ("learning rate of the update", "learning rate"),
    ("decays by", "weight decay"),
    ("of itself beside the update", "layer corrupted"),
    ("changed beside the update", "layer corrupted"),
    ("changed without an update", "layer corrupted"),
)
"""Words in the cause of an audit -> the cause here; the first that fits counts."""


def audit_findings(record: Record, before: CheckpointRef, after: CheckpointRef) -> Iterator[Finding]:
    """Yield what does not balance between two checkpoints, one finding for each kind of cause."""
    table = audit(record.history, before, after, names="*", quiet=True)
    of_kind: dict[str, list[dict[str, object]]] = {}
    for row in table.unbalanced:
        of_kind.setdefault(
            next((kind for words, kind in _KINDS if words in row["cause"]), "layer corrupted"), []
        ).append(row)
    for kind, rows in of_kind.items():
        names = [str(row["name"]) for row in rows]
        yield Finding(
            _exact(kind, names, record, table, after),
            before.step,
            after.step,
            names if len(names) < len(table) else [],
            f"{named(names)}: {rows[0]['cause']}"
            + (f" ({len(names)} of {len(table)} parameters)" if len(names) > 1 else ""),
            f"h.audit({before.step}, {after.step}).unbalanced",
        )


def _exact(kind: str, names: Sequence[str], record: Record, table: AuditTable, after: CheckpointRef) -> str:
    if kind == "learning rate":
        rates = [row["learning_rate"] is not None for row in table]
        return kind if len(names) >= sum(rates) else "learning rate of a group"
    if kind == "foreign optimizer state" and _is_small(record, names, after):
        return "optimizer state reset"
    return kind


def _is_small(record: Record, names: Sequence[str], after: CheckpointRef) -> bool:
    """Return whether second moments are what usual gradients make of zeros, rather than as they were before."""
    if after not in record.analyzed:
        return False
    at = list(record.analyzed).index(after)
    rows = [record.weights.index(name) for name in names if name in record.weights]
    sums = np.nansum(record.part("sum", "exp_avg_sq", record.weights)[rows], axis=0)
    rule = record.rules(len(record.refs) - 1).get(names[0])
    if at < 2 or rule is None or not sums[at] > 0 or not sums[at - 1] > 0:
        return False
    usual = float(np.nanmedian(np.nansum(record.energy[rows], axis=0)[max(1, at - 8) : at]))
    between = record.analyzed[at].step - record.analyzed[at - 1].step
    from_zero = (1 - rule.betas[1] ** between) * usual
    return bool(from_zero > 0 and abs(math.log(sums[at] / from_zero)) < abs(math.log(sums[at] / sums[at - 1])))
