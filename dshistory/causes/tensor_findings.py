"""The findings in a few tensors that are read: which rows changed, which were swapped, which units get no gradient, and
what low precision swallows. Each question reads tensors of two checkpoints.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from catalog.records import CheckpointRef
from dshistory.causes.findings import Finding
from dshistory.causes.record import Record
from dshistory.causes.robust import CLEAR
from dshistory.tensors.checkpoint_tensors import CheckpointTensors

__all__ = ["dead_units", "local_cause", "vanishing_updates"]

_PARTNERS = 16
"""With so many tensors of its shape a tensor is compared, to find the one that it was swapped with."""

_SINGLE_ROWS = 0.5
"""A row is what moved when it has more than this share of the squared movement."""


class _Reader:
    """The tensors of checkpoints, each read at most once, in float64."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._open: dict[CheckpointRef, CheckpointTensors] = {}

    def shape(self, ref: CheckpointRef, kind: str, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None where the checkpoint has none of that name."""
        stored = self._of(ref).tensors.get((kind, name))
        return None if stored is None else tuple(stored.shape)

    def _of(self, ref: CheckpointRef) -> CheckpointTensors:
        if ref not in self._open:
            self._open[ref] = CheckpointTensors(self._record.history, ref, advance=lambda nbytes: None)
        return self._open[ref]

    def __call__(self, ref: CheckpointRef, kind: str, name: str) -> torch.Tensor | None:
        opened = self._of(ref)
        stored = opened.tensors.get((kind, name))
        return None if stored is None else opened.whole(stored)


def local_cause(record: Record, finding: Finding) -> Finding:
    """Return the finding of a corrupted layer with what its tensors say: a swap, dead units, one embedding row."""
    refs = {ref.step: ref for ref in record.refs}
    before, after = refs.get(finding.since), refs.get(finding.step)
    if before is None or after is None:
        return finding
    read = _Reader(record)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in finding.tensors[:8]:
        both = read(before, record.weight_kind, name), read(after, record.weight_kind, name)
        if both[0] is not None and both[1] is not None:
            pairs[name] = both[0].double(), both[1].double()
    if len(pairs) == 1:  # its partner may have moved less, beside what it usually moves
        (name, (old, _)) = next(iter(pairs.items()))
        alike = [one for one in record.weights if read.shape(before, record.weight_kind, one) == tuple(old.shape)]
        for other in [one for one in alike if one != name][:_PARTNERS]:
            both = read(before, record.weight_kind, other), read(after, record.weight_kind, other)
            if both[0] is not None and both[1] is not None:
                pairs[other] = both[0].double(), both[1].double()
    swapped = _swapped(pairs)
    if swapped:
        evidence = f"{swapped[0]} has what {swapped[1]} had, and the other way round; {finding.evidence}"
        return replace(finding, cause="layers swapped", tensors=swapped, evidence=evidence)
    silent = {name: count for name in finding.tensors[:8] if (count := _died(record, read, name, after))}
    if silent:
        name, count = next(iter(silent.items()))
        evidence = f"{count} units of {name} get no gradient from then on; {finding.evidence}"
        return replace(finding, cause="dead units", evidence=evidence)
    for name, (old, new) in list(pairs.items())[: len(finding.tensors)]:
        if old.ndim == 2 and len(old) >= 8:
            rows = (new - old).square().sum(dim=1)
            row = int(rows.argmax())
            if float(rows[row]) > _SINGLE_ROWS * float(rows.sum()):
                share = float(rows[row] / rows.sum())
                evidence = f"row {row} of {name} made {share:.1%} of its squared movement; {finding.evidence}"
                cause = "embedding row" if _is_embedding(record, name) else finding.cause
                return replace(finding, cause=cause, tensors=[name], evidence=evidence)
    return finding


def _swapped(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Sequence[str]:
    """Return the names of two tensors each of which has become what the other one was, but for an update."""
    for first, (old, new) in pairs.items():
        for second, (other_old, other_new) in pairs.items():
            if first < second and old.shape == other_old.shape:
                apart = (new - other_old).norm() + (other_new - old).norm()
                stayed = (new - old).norm() + (other_new - other_old).norm()
                if apart < stayed / 2:
                    return [first, second]
    return []


def dead_units(record: Record) -> Iterator[Finding]:
    """Yield the biases of which elements get no gradient any more to the end of the run: units that are dead, while
    they lived before."""
    read, last = _Reader(record), record.refs[-1]
    if len(record.refs) < 8:
        return
    for name in record.weights:
        if not name.endswith("bias") or not _silent(record, read, name, record.refs[-4]):
            continue
        good, bad = 1, len(record.refs) - 4
        already = _silent(record, read, name, record.refs[good])
        now = _silent(record, read, name, record.refs[bad])
        kind = record.state_kinds[name][-1]
        final = read(last, kind, name)
        if already or final is None or now * 8 < final.numel():
            continue
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if _silent(record, read, name, record.refs[middle]) * 2 >= now else (middle, bad)
        if (
            _silent(record, read, name, record.refs[bad]) - _silent(record, read, name, record.refs[good])
        ) * 8 < final.numel():
            continue  # they died one by one, as units do in healthy trainings
        since, step = record.refs[good].step, record.refs[bad].step
        evidence = f"{now} of {final.numel()} units of {name} get no gradient from step {step} on"
        call = f'h.histogram("{name}", state="{kind}")'
        yield Finding("dead units", since, step, [name], evidence, call, certain=False, surprise=CLEAR)


def _died(record: Record, read: _Reader, name: str, after: CheckpointRef) -> int:
    """Return how many units of a layer get no gradient after a checkpoint, if they are an eighth of it at least; fewer
    are silent in many healthy layers. Rows of an embedding are words, and not units."""
    shape = read.shape(after, record.weight_kind, name)
    if not shape or _is_embedding(record, name):
        return 0
    silent = _silent(record, read, name, after)
    return silent if silent * 8 >= shape[0] else 0


def _is_embedding(record: Record, name: str) -> bool:
    return name.endswith("weight") and (record.weight_kind, name[: -len("weight")] + "bias") not in record.all_keys


def _silent(record: Record, read: _Reader, name: str, after: CheckpointRef) -> int:
    """Return how many units (elements of a vector, rows of a matrix) got no gradient between a checkpoint and the last
    one: all that became of their state is that it decayed, by beta2 or the momentum, within the rounding of float32.
    0 where weight decay is a part of the gradient, so that there always is one."""
    last = record.refs[-1]
    rule = record.rules(len(record.refs) - 1).get(name)
    updates = last.step - after.step
    if rule is None or not rule.kinds or rule.coupled_decay or updates < 3:
        return 0
    early, late = read(after, rule.kinds[-1], name), read(last, rule.kinds[-1], name)
    if early is None or late is None:
        return 0
    decayed = early.double() * (rule.betas[1] if rule.family == "adam" else rule.momentum) ** updates
    silent = ((late.double() - decayed).abs() <= decayed.abs() * 1e-6 * updates + 1e-30) & (early != 0)
    return int(silent.reshape(len(silent), -1).all(dim=1).sum()) if silent.ndim else int(silent)


def vanishing_updates(record: Record) -> Iterator[Finding]:
    """Yield the checkpoint since which half of the low-precision weights without a master copy keep their bits, though
    gradients arrive."""
    low = {"BF16", "F16"}
    checkpoint = CheckpointTensors(record.history, record.refs[-1], advance=lambda nbytes: None)
    if record.weight_kind == "master" or len(record.refs) < 3:
        return
    names = [n for n in record.weights if checkpoint.tensors[("model", n)].dtype in low]
    if not names:
        return
    read = _Reader(record)
    last = len(record.refs) - 1
    for at in sorted({1, max(1, last // 2), last}):
        before, after = record.refs[at - 1], record.refs[at]
        kept = moving = 0
        for name in names:
            old, new = read(before, "model", name), read(after, "model", name)
            state = read(after, record.state_kinds[name][0], name) if name in record.state_kinds else None
            if old is None or new is None or state is None:
                continue
            told = state != 0
            moving += int(told.sum())
            kept += int(((old == new) & told).sum())
        if moving and kept > moving / 2:
            dtype = checkpoint.tensors[("model", names[0])].dtype
            rate = record.rules(at)[names[0]].lr
            evidence = (
                f"{kept / moving:.1%} of the elements that have a step to make keep their bits from {before.step} to "
                f"{after.step}: the learning rate of {rate:.3g} is below the spacing of {dtype}"
            )
            first = record.refs[0].step if at == 1 else before.step
            yield Finding("updates vanish", first, after.step, [], evidence, f"h.diff({before.step}, {after.step})")
            return
