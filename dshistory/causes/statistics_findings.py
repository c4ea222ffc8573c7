"""The findings in the checkpoints' statistics, against the run's own past: bad batches, clipping, tensors that jump or
stop or grow, values that are not finite. No tensor is read.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from dshistory.causes.findings import Finding, named
from dshistory.causes.record import Record
from dshistory.causes.robust import CLEAR, excess, middle
from dshistory.metrics import Floats, rms, typical_size

__all__ = [
    "bad_batches",
    "clipping_off",
    "frozen",
    "group_jumps",
    "growing_norms",
    "jumps",
    "not_finite",
    "suspicion",
]

_LEAST_LOG: Final = 0.02
"""A logarithm that deviates by 2 % counts as steady."""


_LEAST_LOSS: Final = 0.005
_CLEAR_LOSS: Final = 6.0
"""A loss is the mean over a batch, so its noise is nearly normal, and a smaller surprise than elsewhere is clear."""


def _log(values: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(values > 0, np.log(values), np.nan)


def _gap(record: Record, at: int) -> tuple[int, int]:
    return (record.analyzed[at - 1].step if at else record.analyzed[at].step - 1), record.analyzed[at].step


def suspicion(record: Record) -> Floats:
    """Return how unusual each analyzed checkpoint is: the largest surprise of any tensor's movement, gradient or
    norm."""
    if not record.analyzed:
        return np.zeros(0)
    growth = np.abs(np.diff(_log(record.norms), axis=1, prepend=np.nan))
    with np.errstate(invalid="ignore"):
        fell = (record.energy < 0).any(axis=0)
    found = [excess(_log(record.moved), least=_LEAST_LOG), excess(_log(record.energy), least=_LEAST_LOG)]
    found.append(excess(_log(growth), least=_LEAST_LOG))
    most: Floats = np.max([np.abs(each).max(axis=0, initial=0.0) for each in found], axis=0)
    return np.where(fell, np.inf, most)


def not_finite(record: Record) -> Iterator[Finding]:
    """Yield the first checkpoint with weights or moments that are not finite, and where they were born."""
    kinds = [(kind, name) for kind, name in record.all_keys if kind in (record.weight_kind, "exp_avg", "exp_avg_sq")]
    counts = {
        key: record.part("nonfinite", key[0], [key[1]])[0] / record.part("numel", key[0], [key[1]])[0] for key in kinds
    }
    firsts = {key: int(np.argmax(share > 0)) for key, share in counts.items() if (share > 0).any()}
    if not firsts:
        return
    at = min(firsts.values())
    now = sorted(
        (counts[key][at], key[0] != record.weight_kind, key[1]) for key, first in firsts.items() if first == at
    )
    weights = [name for _, is_state, name in now if not is_state]
    born = [name for name in weights if counts.get(("exp_avg", name), np.zeros(at + 1))[at] == 0] or weights
    since, step = _gap(record, at)
    share, _, first = now[0]
    everywhere = len(weights) == len(record.weights) and not any(name in born for name in weights[:0])
    evidence = (
        f"checkpoint {step} is the first with values that are not finite: {len(now)} tensors, {share:.2%} of {first}"
    )
    tensors = [] if everywhere and len(born) == len(weights) else born
    yield Finding("not finite", since, step, tensors, evidence, f"h.diff({since}, {step})")


def bad_batches(record: Record) -> Iterator[Finding]:
    """Yield each step whose loss leaves its neighbours upwards while the gradient that arrived is unusual too."""
    series = record.metrics.get("loss")
    total = np.nansum(np.where(record.energy > 0, record.energy, 0.0), axis=0)
    gradients = excess(_log(total), least=_LEAST_LOG)
    steps = np.array([ref.step for ref in record.analyzed])
    if series is None:
        return
    surprise = excess(_log(series.values), least=_LEAST_LOSS)
    for at in np.flatnonzero(surprise > _SEEN).tolist():
        step = int(series.steps[at])
        if at and surprise[at - 1] > surprise[at] / 2:  # still the same event
            continue
        place = int(np.searchsorted(steps, step))
        seen = gradients[place] if place < len(gradients) else 0.0
        if surprise[at] < (_SEEN if seen > CLEAR else _CLEAR_LOSS):
            continue
        usual = float(np.median(series.values[max(0, at - 5) : at])) if at else math.nan
        evidence = f"the loss of step {step} is {series.values[at]:.4g}, {usual:.4g} before"
        if seen > _SEEN:
            ratio = math.sqrt(total[place] / float(middle(total[max(1, place - 5) : place]))) if place > 1 else math.nan
            evidence += f", and its gradient is {ratio:.3g} times as long as before"
        evidence += _batch_of(record, step)
        call = (
            f"h.sql(\"SELECT step, value FROM metrics WHERE name = 'loss' AND step BETWEEN {step - 5} AND {step + 5} "
        )
        yield Finding(
            "bad batch", step - 1, step, (), evidence, call + 'ORDER BY step")', certain=False, surprise=surprise[at]
        )


def _batch_of(record: Record, step: int) -> str:
    """Return in words which batch the step had, and at which other steps it was seen; nothing where that is unknown."""
    digests = record.batches.get(step, {})
    if not digests:
        return ""
    rank, digest = next(iter(digests.items()))
    again = [str(other) for other, ranks in record.batches.items() if other != step and digest in ranks.values()]
    where = f", which step {', '.join(again[:3])}{' and others' if len(again) > 3 else ''} had too" if again else ""
    ranks = f" on rank {rank}, one of {len(digests)} ranks" if len(digests) > 1 else ""
    return f"; its batch is {digest}{ranks}{where}"


def clipping_off(record: Record) -> Iterator[Finding]:
    """Yield the first checkpoint whose gradient is longer than a length that none before exceeded and half of them
    had."""
    with np.errstate(invalid="ignore"):
        total = np.sqrt(record.energy.sum(axis=0))
    for at in range(7, len(total)):
        past = total[1:at][np.isfinite(total[1:at])]
        if len(past) < 6 or not total[at] > 0:
            continue
        limit = float(past.max())
        same = past > limit * (1 - _CLIPPED)
        if same.sum() >= max(6, len(past) / 2) and total[at] > limit * (1 + 10 * _CLIPPED):
            since, step = _gap(record, at)
            evidence = (
                f"the gradient is {total[at]:.4g} long; {int(same.sum())} of {len(past)} before were {limit:.4g} long, "
                "as clipping makes them, and none was longer"
            )
            yield Finding("clipping off", since, step, (), evidence, f"h.audit({since}, {step})")
            return


_CLIPPED: Final = 2e-3
"""Clipped lengths are equal but for the rounding of second moments: float32, over 1 - beta2."""


def frozen(record: Record) -> Iterator[Finding]:
    """Yield the weights that moved once and then never again, though others moved on."""
    stored = record.stored
    places = [
        row
        for row, (kind, name) in enumerate(record.all_keys)
        if kind == record.weight_kind and name in set(record.weights)
    ]
    if len(record.refs) < 4 or not places:
        return
    same, follows = stored.same[places], stored.follows[places]
    moves = follows & ~same
    last = np.where(moves.any(axis=1), moves.shape[1] - 1 - np.argmax(moves[:, ::-1], axis=1), -1)
    end = int(last.max())
    still = [row for row in range(len(places)) if 0 < last[row] <= end - 3]
    for at in sorted({int(last[row]) for row in still}):
        names = [record.all_keys[places[row]][1] for row in still if last[row] == at]
        # The last update of theirs is one of those up to this checkpoint; the one after it is the first without.
        since, step = record.refs[at - 1].step + 1, record.refs[at].step + 1
        evidence = (
            f"{named(names)}: equal bit for bit in the {len(record.refs) - at} checkpoints from {record.refs[at].step} "
            f"on, while {int((last == end).sum())} other weights moved"
        )
        yield Finding("frozen", since, step, names, evidence, f'h.trajectory("{names[0]}", metric="update_norm")')


def jumps(record: Record) -> Iterator[Finding]:
    """Yield where weights moved much further than around that time, though their gradients were as usual."""
    if len(record.analyzed) < 2:
        return
    # What all weights do at once is not local, and its noise is no noise of theirs.
    common = _log(record.moved) - middle(_log(record.moved).T)
    far = np.maximum(excess(_log(record.moved), least=0.05), excess(common, least=0.05))
    gradient = excess(_log(record.energy), least=0.05)
    moved = _log(record.moved)
    for at in _farthest(far, gradient):
        beyond = record.moved[:, at] > _MARGIN * record.reach(at)
        seen = beyond | ((far[:, at] > CLEAR) & (far[:, at] > 2 * gradient[:, at]))
        rows = [
            row
            for row in np.flatnonzero(seen).tolist()
            if beyond[row] or moved[row, at] - float(middle(moved[row, max(1, at - 5) : at])) > _FARTHER
        ]
        if not len(rows):
            continue
        rows = sorted(rows, key=lambda row: (not beyond[row], -far[row, at]))
        names = [record.weights[row] for row in rows]
        since, step = _gap(record, at)
        ratio = math.exp(moved[rows[0], at] - float(middle(moved[rows[0], max(1, at - 5) : at])))
        group = _group_of(record, names)
        farther = [row for row, name in enumerate(record.weights) if name in group and far[row, at] > _SEEN]
        elsewhere = [row for row, name in enumerate(record.weights) if name not in group and far[row, at] > _SEEN]
        of_group = len(names) > 1 and len(farther) > len(group) / 2 and len(elsewhere) < len(names) / 2
        if len(names) > 0.8 * len(record.weights):
            cause = "learning rate"
            tensors: Sequence[str] = []
        elif of_group:
            cause, tensors = "learning rate of a group", group
        else:
            cause, tensors = "layer corrupted", names
        why = "farther than its learning rates let Adam go" if beyond[rows[0]] else "while the gradients were as usual"
        evidence = (
            f"{named(names)} moved up to {ratio:.3g} times as far as before, {why} ({len(names)} of "
            f"{len(record.weights)} weights did)"
        )
        yield Finding(
            cause,
            since,
            step,
            tensors,
            evidence,
            f"h.diff({since}, {step})",
            certain=bool(beyond[rows[0]]),
            surprise=float(far[rows[0], at]),
        )


def _farthest(far: Floats, gradient: Floats) -> list[int]:
    """Return the places whose weights moved farthest beside around that time, in order: those that are looked at more
    closely, since the groups of a checkpoint are a file of their own."""
    surprise = (far - np.maximum(gradient, 0.0)).max(axis=0, initial=0.0)
    alone = far.max(axis=0, initial=0.0)
    wanted = {*np.argsort(-surprise, kind="stable")[:_CLOSER], *np.argsort(-alone, kind="stable")[:_CLOSER]}
    return sorted(int(at) for at in wanted if at >= 2 and alone[at] > _SEEN)


_CLOSER: Final = 24
_FARTHER: Final = math.log(2.5)
_MARGIN: Final = 1.5
"""Distances come from sketches, which are off by less than half (docs/sketches.md)."""
_SEEN: Final = 3.0
"""A surprise that says something only where another one is clear."""


def _group_of(record: Record, names: Sequence[str]) -> Sequence[str]:
    """Return the group of parameters with equal hyperparameters that has all of these; none if there is none, or if it
    is all that there are."""
    rules = record.rules(len(record.refs) - 1)
    if not all(name in rules for name in names):
        return []
    wanted = rules[names[0]]
    group = [name for name in record.weights if rules.get(name) == wanted]
    return group if set(names) <= set(group) and len(group) < len(record.weights) else []


def group_jumps(record: Record) -> Iterator[Finding]:
    """Yield where the weights of a group moved further, beside all others, than around that time."""
    rules = record.rules(len(record.refs) - 1)
    groups = [_group_of(record, [name]) for name in dict.fromkeys(record.weights) if name in rules]
    moved = _log(record.moved)
    for group in {tuple(group): group for group in groups if len(group) >= _MANY}.values():
        rows = [row for row, name in enumerate(record.weights) if name in set(group)]
        others = [row for row in range(len(record.weights)) if row not in set(rows)]
        if len(others) < _MANY or moved.shape[1] < 8:
            continue
        apart = middle(moved[rows].T) - middle(moved[others].T)
        far = excess(apart, least=_LEAST_LOG)
        at = int(np.argmax(far[3:])) + 3
        ratio = math.exp(apart[at] - float(middle(apart[max(1, at - 5) : at])))
        if far[at] > _CLEAR_GROUP and ratio > _GROUP_FARTHER:
            since, step = _gap(record, at)
            evidence = (
                f"the {len(rows)} weights of the group of {group[0]} moved {ratio:.3g} times as far as before, beside "
                f"the {len(others)} others"
            )
            cause, call = "learning rate of a group", f"h.diff({since}, {step})"
            yield Finding(cause, since, step, group, evidence, call, certain=False, surprise=float(far[at]))


_MANY: Final = 5
_GROUP_FARTHER: Final = 1.3
_CLEAR_GROUP: Final = 5.0
"""Medians over many weights have nearly normal noise."""


def growing_norms(record: Record) -> Iterator[Finding]:
    """Yield weights whose growth more than doubles, quickens from one checkpoint to the next by three times more than
    it changed in the eight before, and keeps that pace.

    Growth is measured beside the learning rates that it had, so that a warm-up is none. A weight that is smaller than
    typical ones, as a bias that was born at zero, may grow."""
    logarithms = _log(record.norms)
    growth = np.diff(logarithms, axis=1) / record.pace[1:]
    numel = record.part("numel", record.weight_kind, record.weights)
    size = rms(record.norms**2, numel)
    is_small = size[:, -1] < typical_size(size, numel)[-1] / 2
    for row, name in enumerate(record.weights):
        if is_small[row]:
            continue
        rates, levels = growth[row], logarithms[row]
        for first in range(_PAST, len(rates) - 2):
            at = first
            changes, after = np.abs(np.diff(rates[at - _PAST : at])), rates[at:]
            quickened = after[:2].max() - rates[at - 1]
            lasts = np.median(after[: 2 * _PAST]) > rates[at - 1] + quickened / 2 and after[:3].min() > 0
            doubles = np.median(after) > 2 * rates[at - 1]
            if not (quickened > 3 * max(float(changes.max()), _LEAST_GROWTH) and lasts and doubles):
                continue
            at += int(after[1] - after[0] > after[0] - rates[at - 1])
            gained = levels[-1] - levels[at]
            if gained > math.log(1.1):
                since, step = record.analyzed[at].step, record.analyzed[at + 1].step
                evidence = (
                    f"{name} grew {math.exp(gained):.3g}-fold from step {since} on, by {np.median(after):.2%} a "
                    f"checkpoint; by {rates[at - 1]:.2%} right before"
                )
                call = f'h.trajectory("{name}", metric="norm")'
                strength = CLEAR * float(quickened / max(float(changes.max()), _LEAST_GROWTH)) / 3
                yield Finding("norm grows", since, step, [name], evidence, call, certain=False, surprise=strength)
            break


_PAST: Final = 8
_LEAST_GROWTH: Final = 1e-4
"""A norm that grows by less than this in a checkpoint counts as steady."""
