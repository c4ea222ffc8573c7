"""The diagnosis of a run: a few causes in the order in which to look at them, each with its evidence.

    metrics of every step, groups, statistics  ->  findings, and the checkpoints that are most unusual
    -> audits of those, and of those that a finding names  ->  what the hit tensors themselves say  ->  the order

Whatever the length of the run, the tensors of at most 2 * _AUDITS pairs of checkpoints are read, and the groups of at
most about 150 checkpoints; of the others only metrics, statistics, and what the index says.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from catalog.history import History
from dshistory.causes.audit_findings import audit_findings
from dshistory.causes.findings import Finding, named
from dshistory.causes.metric_findings import learning_rate_findings, loss_not_finite, rule_findings
from dshistory.causes.momentum_findings import buffers_replaced, gradients_longer
from dshistory.causes.record import Record
from dshistory.causes.robust import CLEAR
from dshistory.causes.statistics_findings import (
    bad_batches,
    clipping_off,
    frozen,
    group_jumps,
    growing_norms,
    jumps,
    not_finite,
    suspicion,
)
from dshistory.causes.tensor_findings import dead_units, local_cause, vanishing_updates
from dshistory.display.formats import counted
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout

__all__ = ["DiagnosisTable", "diagnose"]

_SCHEMA: Final = pa.schema(
    [
        ("cause", pa.string()),
        ("step", pa.int64()),
        ("since", pa.int64()),
        ("what", pa.string()),
        ("brought_about", pa.string()),
        ("evidence", pa.string()),
        ("call", pa.string()),
        ("tensors", pa.list_(pa.string())),
    ]
)
_LAYOUT: Final = Layout(gives_way=("tensors", "call", "brought_about", "since"))
_AUDITS: Final = 12
_SHOWN: Final = 5
_CONSEQUENCES: Final = ("not finite", "dead units", "bad batch", "clipping off", "norm grows")
"""The causes that others bring about: a certain cause of another kind that set in no later comes before them."""

_OF_WEIGHTS: Final = ("layer corrupted", "layers swapped", "dead units", "embedding row", "learning rate of a group")
_OF_STATE: Final = ("optimizer state reset", "foreign optimizer state")
_SLOW: Final = ("norm grows", "dead units")
"""Deviations that brought about nothing that is certain: they are too slow for it."""


_AFTERMATH: Final = 5
"""So many checkpoints after a cause, what is unusual is its doing, unless it can't be."""


class DiagnosisTable(Table):
    """A row for each cause, the likeliest first; see `Explorer.diagnose`. `call` is the line of Python that shows it,
    on an explorer `h`; `brought_about` says what followed from it."""

    consequences: Table
    """The rows of what followed from the causes, which are no rows of their own."""


def diagnose(history: History, step: int | None, *, run: str | None, quiet: bool) -> DiagnosisTable:
    """See `Explorer.diagnose`."""
    record = Record(history, run)
    findings, audited = _findings(record, quiet=quiet)
    if step is not None:
        findings = [finding for finding in findings if finding.since < step]
    folded = _folded(_ranked(findings))
    shown = list(folded)[:_SHOWN]
    rows = [_row(finding, brought_about=folded[finding]) for finding in shown]
    note = _note(record, len(shown), audited)
    table = DiagnosisTable(pa.Table.from_pylist(rows, schema=_SCHEMA), note=note, layout=_LAYOUT)
    followed = [_row(each) for finding in shown for each in folded[finding]]
    table.consequences = Table(pa.Table.from_pylist(followed, schema=_SCHEMA), layout=_LAYOUT)
    return table


def _findings(record: Record, *, quiet: bool) -> tuple[list[Finding], int]:
    found = list(_cheap(record))
    pairs = _suspects(record, found)
    with ByteProgress(len(pairs), description="diagnose", quiet=quiet) as bar:
        for place in pairs:
            found += audit_findings(record, record.refs[place - 1], record.refs[place])
            bar.advance(1)
    if not record.rules(len(record.refs) - 1):
        return found, 0
    found += vanishing_updates(record)
    found = [local_cause(record, each) if each.cause == "layer corrupted" else each for each in found]
    if not any(each.cause == "dead units" for each in found):
        found += dead_units(record)
    return found, len(pairs)


def _cheap(record: Record) -> Iterator[Finding]:
    yield from learning_rate_findings(record)
    yield from rule_findings(record)
    yield from loss_not_finite(record)
    yield from bad_batches(record)
    yield from frozen(record)
    if len(record.analyzed) > 1:
        for look in (not_finite, clipping_off, gradients_longer, buffers_replaced, jumps, group_jumps, growing_norms):
            yield from look(record)


def _suspects(record: Record, found: Sequence[Finding]) -> list[int]:
    """Return the places of the checkpoints to audit, each with the one before; none without an optimizer."""
    if not record.rules(0):
        return []
    unusual = suspicion(record)
    wanted = [record.place_of_analyzed[at] for at in np.argsort(-unusual, kind="stable")[:_AUDITS].tolist()]
    steps = [ref.step for ref in record.refs]
    named_steps = {step for finding in found for step in (finding.step, finding.step + 1)}
    wanted = [int(np.searchsorted(steps, step)) for step in sorted(named_steps)][:_AUDITS] + wanted
    return sorted({place for place in wanted if 0 < place < len(steps)})[: 2 * _AUDITS]


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings in the order in which to look at them: certain ones by the step at which they set in, with
    those that others bring about behind these; then deviations, the most surprising first. What follows from a cause
    stands behind it."""
    certain = sorted((each for each in findings if each.certain), key=lambda each: _order(each, findings))
    others = sorted((each for each in findings if not each.certain), key=lambda each: -each.surprise)
    follows = [each for each in others if any(_follows(each, one) for one in findings)]
    others = [each for each in others if each not in follows]
    if certain and certain[0].cause in _CONSEQUENCES:
        brought = [
            each
            for each in others
            if each.step <= certain[0].step and each.surprise > CLEAR and each.cause not in _SLOW
        ][:1]
        others = [each for each in others if each not in brought]
        certain = brought + certain
    kept: list[Finding] = []
    for each in [*certain, *others, *follows]:
        if not any(one.cause == each.cause and one.since <= each.step <= one.step + 1 for one in kept):
            kept.append(each)
    return kept


def _follows(finding: Finding, other: Finding) -> bool:
    """Return whether a deviation is the other's doing: a loss that jumps right after some weights did, since then the
    batch was good, units that die in the update of a bad batch, or a jump of weights that go on as they began."""
    if finding.cause == "dead units" and finding.surprise <= CLEAR:  # their weights moved as usual: nobody killed them
        return other.cause == "bad batch" and finding.since < other.step <= finding.step
    if finding.cause == "bad batch":
        if other.cause == "clipping off":  # as long as it was on, no batch made a longer gradient
            return other.since < finding.step and finding.since < other.step
        is_clear = other.certain or other.surprise > CLEAR
        return is_clear and other.cause in _OF_WEIGHTS and other.since < finding.step and finding.since <= other.step
    jumps = finding.cause in _OF_WEIGHTS and finding.cause != "dead units"
    return jumps and other.cause == "norm grows" and finding.since <= other.step and other.since <= finding.step


def _folded(ranked: Sequence[Finding]) -> dict[Finding, list[Finding]]:
    """Return the causes, in order, each with what it brought about: the deviations, and the sorts of findings that
    others bring about, that were seen no earlier than it and soon after it."""
    folded: dict[Finding, list[Finding]] = {}
    for each in ranked:
        may_follow = not each.certain or each.cause in _CONSEQUENCES
        cause = next((one for one in folded if may_follow and _comes_after(each, one)), None)
        if cause is None:
            folded[each] = []
        else:
            folded[cause].append(each)
    return folded


def _comes_after(finding: Finding, other: Finding) -> bool:
    far = max(finding.step - finding.since, other.step - other.since, 1)
    return other.step <= finding.step and finding.since <= other.step + _AFTERMATH * far


def _order(finding: Finding, findings: Sequence[Finding]) -> tuple[object, ...]:
    is_brought = finding.cause in _CONSEQUENCES or _is_of_state(finding, findings)
    return finding.step, is_brought, finding.since, len(finding.tensors) or 1 << 30


def _is_of_state(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Return whether it is a jump of weights between two checkpoints between which the books say that the optimizer's
    state was reset or exchanged, which drove them."""
    between = [each for each in findings if (each.since, each.step) == (finding.since, finding.step) and each.certain]
    return finding.cause in _OF_WEIGHTS and any(each.cause in _OF_STATE for each in between)


def _row(finding: Finding, *, brought_about: Sequence[Finding] = ()) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "step": finding.step,
        "since": finding.since,
        "what": named(finding.tensors) or "all",
        "brought_about": ", ".join(f"{each.cause} ({each.step})" for each in brought_about) or None,
        "evidence": finding.evidence,
        "call": finding.call,
        "tensors": list(finding.tensors),
    }


def _note(record: Record, found: int, audited: int) -> str:
    """Say what was found, and what could not be checked."""
    unknown = []
    if len(record.analyzed) < len(record.refs):
        missing = counted(len(record.refs) - len(record.analyzed), "checkpoint")
        unknown.append(f"{missing} without statistics (`analyze` computes them)")
    if "loss" not in record.metrics:
        unknown.append("the loss, which was not recorded")
    if not record.rules(len(record.refs) - 1):
        unknown.append("the optimizer, which was not captured")
    head = counted(found, "cause") if found else "nothing found"
    note = f"{head} in {counted(len(record.refs), 'checkpoint')}, {audited} of which were audited"
    return note + (f"; not checked: {', '.join(unknown)}" if unknown else "")
