"""The audit of the optimizer's books: does every parameter's movement follow from the optimizer's own state?

    rules and step counts of both sides  ->  each parameter's weights and moments, streamed side by side into its books
    -> a row: what the update really did, and what does not balance

Everything that is reported exceeds what rounding can do (`books`), so a row with a cause is never noise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from capture.state.dtypes import torch_dtype
from catalog.errors import NotFoundError, SetupError
from catalog.history import History
from catalog.read.fragments import StoredTensor
from catalog.records import CheckpointRef
from catalog.references import committed_lineage, generations
from dshistory.causes.books import CHUNK_NUMEL, AdamBooks, MomentumBooks, Movement, Rounding
from dshistory.causes.rules import Rule, rules_of, step_counts
from dshistory.display.formats import Format, counted
from dshistory.display.progress import ByteProgress
from dshistory.display.table import Table
from dshistory.display.text import Layout
from dshistory.patterns import Patterns, matching
from dshistory.tensors.checkpoint_tensors import CheckpointTensors, MadeAgain
from dshistory.tensors.stream import side_by_side

__all__ = ["AuditTable", "audit"]

_SCHEMA: Final = pa.schema(
    [
        ("name", pa.string()),
        ("cause", pa.string()),
        ("updates", pa.int64()),
        ("gradient_norm", pa.float64()),
        ("gradient_noise", pa.float64()),
        ("signal_to_noise", pa.float64()),
        ("learning_rate", pa.float64()),
        ("group_learning_rate", pa.float64()),
        ("decay", pa.float64()),
        ("group_decay", pa.float64()),
        ("second_moment", pa.float64()),
        ("unexplained", pa.float64()),
        ("over_bound", pa.float64()),
    ]
)
_FORMATS: Final[dict[str, Format]] = {"unexplained": "share"}
_LAYOUT: Final = Layout(
    gives_way=(
        "over_bound",
        "signal_to_noise",
        "gradient_noise",
        "second_moment",
        "group_decay",
        "decay",
        "unexplained",
        "updates",
    )
)

Finding = tuple[float, str]
"""By how much a figure exceeds what rounding can do, and the sentence about it."""


class AuditTable(Table):
    """A row for each parameter that an optimizer holds, what balances least first; see `Explorer.audit`."""

    @property
    def unbalanced(self) -> "AuditTable":
        """The rows with a cause."""
        return self._of(self.to_arrow().filter(self.to_arrow()["cause"].is_valid()))


@dataclass(frozen=True)
class _Side:
    """A checkpoint, with the count of updates that each parameter has had."""

    tensors: CheckpointTensors
    counts: Mapping[str, int]

    def weights(self, name: str) -> StoredTensor | None:
        return self.tensors.tensors.get(("master", name)) or self.tensors.tensors.get(("model", name))

    def state(self, kind: str, name: str) -> StoredTensor | None:
        return self.tensors.tensors.get((kind, name))


def audit(
    history: History,
    before: CheckpointRef | None,
    after: CheckpointRef,
    *,
    names: Patterns,
    quiet: bool,
    made_again: Sequence[MadeAgain | None] = (None, None),
) -> AuditTable:
    """See `Explorer.audit`; without `before`, the step right before `after` in its lineage.

    made_again: how the two steps are made again if they are in a redo log, as for `CheckpointTensors`
    """
    before = _predecessor(history, before, after)
    sides = [
        CheckpointTensors(history, ref, advance=lambda nbytes: None, made_again=made)
        for ref, made in zip((before, after), made_again, strict=True)
    ]
    rules, rules_after = (rules_of(side) for side in sides)
    if not rules:
        raise NotFoundError(
            f"checkpoint {before} has no optimizer: an audit compares weights with its moments; capture it with "
            "capture.enable(model, optimizer=...)"
        )
    wanted = sorted(matching(set(rules), names, what="parameter", where=f"the optimizer of {before}"))
    first, second = (_Side(side, step_counts(side)) for side in sides)
    pairs = {name: _inputs(name, rules[name], first, second) for name in wanted}
    total = sum(tensor.nbytes for inputs in pairs.values() for tensor in inputs)
    with ByteProgress(total, description=f"audit {before} {after}", quiet=quiet) as bar:
        rows = [
            _row(
                history.root,
                name,
                (rules[name], rules_after.get(name, rules[name])),
                first,
                second,
                inputs=inputs,
                advance=bar.advance,
            )
            for name, inputs in pairs.items()
        ]
    rows.sort(key=lambda row: (row["cause"] is None, -(row["over_bound"] or 0.0), -(row["gradient_norm"] or 0.0)))
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    return AuditTable(table, formats=_FORMATS, note=_note(rows, rules, before, after), layout=_LAYOUT)


def _predecessor(history: History, before: CheckpointRef | None, after: CheckpointRef) -> CheckpointRef:
    """Return the step before: by default the checkpoint before a checkpoint, and before a step of a redo log that
    step. SetupError unless `after` came from it by training on."""
    path = committed_lineage(history.paths, after.run)
    earlier = [ref for ref in path if ref.step < after.step]
    if before is None:
        if after not in path:
            return CheckpointRef(after.run, after.step - 1)
        if not earlier:
            raise NotFoundError(f"audit: checkpoint {after} is the first of its run, so there is none to compare with")
        return earlier[-1]
    runs = generations(history.paths, after.run)
    if before.step >= after.step or not any(
        before.run == run and (last is None or before.step <= last) for run, last in runs
    ):
        raise SetupError(
            f"audit: checkpoint {after} did not come from {before} by training on; it came from "
            f"{', '.join(map(str, earlier[-3:])) or 'none'}: pass one of those first"
        )
    return before


def _inputs(name: str, rule: Rule, first: _Side, second: _Side) -> list[StoredTensor]:
    """Return the tensors that the books of a parameter need: weights and state, each before and after, and amsgrad's
    largest second moment. None where there is no state on one of the sides."""
    kinds = rule.kinds
    found = [side.weights(name) for side in (first, second)]
    found += [side.state(kind, name) for kind in kinds for side in (first, second)]
    if rule.amsgrad:
        found.append(second.state("max_exp_avg_sq", name))
    whole = [tensor for tensor in found if tensor is not None]
    shapes = {tensor.shape for tensor in whole}
    return whole if kinds and len(whole) == len(found) and len(shapes) == 1 else []


def _row(
    root: Path,
    name: str,
    rules: Sequence[Rule],
    first: _Side,
    second: _Side,
    *,
    inputs: Sequence[StoredTensor],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return the row of a parameter by the rule, of those that the two checkpoints have, that explains the update."""
    row = _row_by(root, name, rules[0], first, second, inputs=inputs, advance=advance)
    for rule in rules[1:]:
        if row["cause"] is not None and rule != rules[0]:
            other = _row_by(root, name, rule, first, second, inputs=inputs, advance=lambda nbytes: None)
            row = other if other["cause"] is None else row
    return row


def _row_by(
    root: Path,
    name: str,
    rule: Rule,
    first: _Side,
    second: _Side,
    *,
    inputs: Sequence[StoredTensor],
    advance: Callable[[int], None],
) -> dict[str, Any]:
    between = second.tensors.ref.step - first.tensors.ref.step
    count = (first.counts.get(name), second.counts.get(name))
    updates = between if None in count else second.counts[name] - first.counts[name]
    row: dict[str, Any] = dict.fromkeys(_SCHEMA.names) | {"name": name}
    if rule.family is None:
        return row
    row |= {"updates": updates, "group_learning_rate": rule.lr}
    if updates < 0:
        cause = f"optimizer state reset: it counted {count[0]} updates before and {count[1]} after"
        return row | {"cause": cause, "over_bound": math.inf}
    moved = _moved(first.weights(name), second.weights(name))
    has_state = any(side.state(kind, name) is not None for kind in rule.kinds for side in (first, second))
    if updates == 0 or (rule.family == "adam" and not has_state):
        found = {"cause": "changed without an update", "over_bound": math.inf} if moved else {}
        return row | {"updates": 0, **found}
    if updates > between:
        cause = f"optimizer state from elsewhere: {counted(updates, 'update')} counted in {counted(between, 'step')}"
        return row | {"cause": cause, "over_bound": math.inf}
    # SGD counts nothing: a parameter that did not move had no gradient, or had no update at all.
    if not inputs or (rule.family == "sgd" and (updates != 1 or not moved)):
        return row
    rounding = Rounding.of([torch_dtype(tensor.dtype) for tensor in inputs])
    books = (
        AdamBooks(rule, updates, second.counts.get(name, 0), rounding)
        if rule.family == "adam"
        else MomentumBooks(rule, rounding)
    )
    held = {**first.tensors.held, **second.tensors.held}
    for stored in side_by_side(root, inputs, advance, most_numel=CHUNK_NUMEL, held=held):
        chunk = [values.double() for values in stored]
        broken = [i for i, values in enumerate(chunk) if not math.isfinite(float(values.sum()))]
        if broken:
            return row | {"cause": _not_finite(broken), "over_bound": math.inf}
        books.add(chunk)
    if updates > 1:
        return row | _cause(_second_moment(books) if isinstance(books, AdamBooks) else [])
    return row | _figures(rule, books)


def _moved(before: StoredTensor | None, after: StoredTensor | None) -> bool:
    return before is not None and after is not None and not before.same_bytes(after)


def _not_finite(broken: Sequence[int]) -> str:
    """Say where values are not finite, by the places of the inputs: weights before and after, then state before and
    after."""
    if any(place % 2 == 0 for place in broken):
        return "not finite already before the update"
    return "the gradient was not finite" if any(place > 1 for place in broken) else "not finite after the update"


def _figures(rule: Rule, books: AdamBooks | MomentumBooks) -> dict[str, Any]:
    movement = books.movement
    findings = _movement(rule, movement)
    lr, decay = movement.solved()
    if not findings or lr is None:
        lr, decay = movement.alone(rule.lr, rule.decay)
    row: dict[str, Any] = {
        "gradient_norm": math.sqrt(books.gradient_squares),
        "learning_rate": lr,
        "decay": decay,
        "group_decay": rule.decay,
        "unexplained": movement.unexplained(rule.lr, rule.decay) / movement.norm if movement.norm else 0.0,
    }
    if isinstance(books, AdamBooks):
        row["gradient_noise"] = math.sqrt(books.noise_squares) if books.count > 1 else None
        row["signal_to_noise"] = books.signal / books.spread if books.spread else None
        row["second_moment"] = books.second / books.second_expected if books.second_expected else None
        findings += _second_moment(books)
    return row | _cause(findings)


def _movement(rule: Rule, movement: Movement) -> list[Finding]:
    """Return what the weights did that the update as it was told does not explain, the nearest explanation alone."""
    told_decay = rule.decay
    if movement.unexplained(rule.lr, told_decay) <= movement.error(rule.lr):
        return []
    lr, decay = movement.solved()
    if lr is None or decay is None:
        alone, _ = movement.alone(rule.lr, told_decay)
        lr, decay = rule.lr if alone is None else alone, told_decay
    left, error = movement.unexplained(lr, decay), movement.error(lr)
    if left > error:
        share = left / movement.norm
        return [(left / error, f"changed beside the update: {share:.2g} of its movement is not the optimizer's")]
    lr_error, decay_error = movement.errors(lr)
    findings = []
    if abs(lr - rule.lr) > lr_error:
        told = f"the group says {rule.lr:.4g}"
        factor = f"x{lr / rule.lr:.3g}, " if rule.lr else ""
        findings.append((abs(lr - rule.lr) / lr_error, f"learning rate of the update {factor}{lr:.4g} ({told})"))
    if abs(decay - told_decay) > decay_error:
        verb = f"decays by {decay:.2g} of itself in" if decay > 0 else f"grows by {-decay:.2g} of itself beside"
        sentence = f"{verb} the update (the group says {told_decay:.2g})"
        findings.append((abs(decay - told_decay) / decay_error, sentence))
    return findings


def _second_moment(books: AdamBooks) -> list[Finding]:
    if books.fell_too_fast:
        elements = counted(books.fell_too_fast, "element")
        return [(math.inf, f"second moment fell faster than beta2 allows in {elements}")]
    if books.disagree:
        elements = counted(books.disagree, "element")
        return [(math.inf, f"second moment does not agree with the first in {elements}")]
    return []


def _cause(findings: Sequence[Finding]) -> dict[str, Any]:
    if not findings:
        return {}
    ordered = sorted(findings, key=lambda finding: -finding[0])
    return {"cause": "; ".join(sentence for _, sentence in ordered), "over_bound": ordered[0][0]}


def _note(
    rows: Sequence[Mapping[str, Any]], rules: Mapping[str, Rule], before: CheckpointRef, after: CheckpointRef
) -> str:
    """Say what balances and what could not be checked."""
    caused = sum(row["cause"] is not None for row in rows)
    checked = sum(row["learning_rate"] is not None for row in rows)
    several = after.step - before.step > 1
    if caused:
        balance = f"{caused} of {counted(len(rows), 'parameter')} do not balance"
    elif several:
        balance = "no count and no second moment contradicts"
    else:
        balance = f"{checked} of {counted(len(rows), 'parameter')} checked: the books balance"
    note = f"{before.step} to {after.step}: {balance}"
    if several:
        note += "; over several updates no more can be checked: capture every step to see more"
    elif checked < len(rows):
        unknown = sorted({rules[row["name"]].optimizer for row in rows if row["learning_rate"] is None})
        note += f"; without a movement that can be checked: {len(rows) - checked} ({', '.join(unknown)})"
    return note
