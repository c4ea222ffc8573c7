"""The findings in the checkpoints' statistics, against the run's own past: bad batches, clipping, tensors that jump or
stop or grow, values that are not finite. No tensor is read.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from catalog.statistics.compute import buckets_of
from dshistory.causes.findings import Finding, named
from dshistory.causes.record import Record
from dshistory.causes.robust import CLEAR, CLEAR_LOSS, CLEAR_OF_MANY, SEEN, excess, log, middle
from dshistory.metrics import AS_NORMAL, Floats, rms, typical_size

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
"""A logarithm, or a share, that deviates by 2 % counts as steady."""


_LEAST_LOSS: Final = 0.005


def suspicion(record: Record) -> Floats:
    """Return how unusual each analyzed checkpoint is: the largest surprise of any tensor's movement, gradient or
    norm."""
    if not record.analyzed:
        return np.zeros(0)
    growth = np.abs(np.diff(log(record.norms), axis=1, prepend=np.nan))
    with np.errstate(invalid="ignore"):
        fell = (record.energy < 0).any(axis=0)
    found = [excess(log(record.moved), least=_LEAST_LOG), excess(log(record.energy), least=_LEAST_LOG)]
    found.append(excess(log(growth), least=_LEAST_LOG))
    most: Floats = np.max([np.abs(each).max(axis=0, initial=0.0) for each in found], axis=0)
    return np.where(fell, np.inf, most)


def not_finite(record: Record) -> Iterator[Finding]:
    """Yield the first checkpoint with weights or moments that are not finite, and where they were born."""
    kinds = [
        (kind, name)
        for kind, name in record.all_keys
        if kind == record.weight_kind or kind in record.state_kinds.get(name, ())
    ]
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
    first_kind = {name: found[0] for name, found in record.state_kinds.items()}
    born = [
        name for name in weights if counts.get((first_kind.get(name, ""), name), np.zeros(at + 1))[at] == 0
    ] or weights
    since, step = record.gap(at)
    share, _, first = now[0]
    evidence = (
        f"checkpoint {step} is the first with values that are not finite: {len(now)} tensors, {share:.2%} of {first}"
    )
    tensors = born if len(born) < len(record.weights) else []
    yield Finding("not finite", since, step, tensors, evidence, f"h.diff({since}, {step})")


def bad_batches(record: Record) -> Iterator[Finding]:
    """Yield each step whose loss leaves its neighbours upwards while the gradient that arrived is unusual too, and each
    checkpoint whose gradient alone is far too long, once and of most weights."""
    series = record.metrics.get("loss")
    if series is None:
        return
    total = np.nansum(np.where(record.energy > 0, record.energy, 0.0), axis=0)
    gradients = excess(log(total), least=_LEAST_LOG)
    steps = np.array([ref.step for ref in record.analyzed])
    surprise = excess(log(series.values), least=_LEAST_LOSS)
    told = []
    for at in np.flatnonzero(surprise > SEEN).tolist():
        step = int(series.steps[at])
        if at and surprise[at - 1] > surprise[at] / 2:  # still the same event
            continue
        place = int(np.searchsorted(steps, step))
        seen = gradients[place] if place < len(gradients) else 0.0
        if surprise[at] < (SEEN if seen > CLEAR else CLEAR_LOSS):
            continue
        usual = float(np.median(series.values[max(0, at - 5) : at])) if at else math.nan
        evidence = f"the loss of step {step} is {series.values[at]:.4g}, {usual:.4g} before"
        if seen > SEEN:
            evidence += f", and its gradient is {_longer(total, place):.3g} times as long as before"
        told.append(place)
        yield _bad_batch(record, step - 1, step, evidence, float(surprise[at]))
    alone = np.append(gradients[1:], 0.0) < SEEN
    once = excess(log(total), least=_LEAST_LOG, at_once=True)
    of_most = excess(middle(log(record.energy).T), least=_LEAST_LOG)
    for place in np.flatnonzero((once > CLEAR) & (of_most > CLEAR_OF_MANY) & alone & ~record.gone).tolist():
        if place > 2 and not {place - 1, place} & set(told):
            since, step = record.gap(place)
            evidence = (
                f"the gradient is {_longer(total, place):.3g} times as long as before, once; the loss was as usual"
            )
            yield _bad_batch(record, since, step, evidence, float(gradients[place]))


def _bad_batch(record: Record, since: int, step: int, evidence: str, surprise: float) -> Finding:
    if step - since == 1:
        evidence += _batch_of(record, step)
    call = (
        f"h.sql(\"SELECT step, value FROM metrics WHERE name = 'loss' AND step BETWEEN {step - 5} AND {step + 5} "
        'ORDER BY step")'
    )
    return Finding("bad batch", since, step, (), evidence, call, certain=False, surprise=surprise)


def _longer(total: Floats, place: int) -> float:
    """Return how many times as long as before the gradients up to a place are."""
    return math.sqrt(total[place] / float(middle(total[max(1, place - 5) : place]))) if place > 1 else math.nan


def _batch_of(record: Record, step: int) -> str:
    """Return in words which batch the step had, and at which other steps it was seen; nothing where that is unknown."""
    digests = record.batches.get(step, {})
    if not digests:
        return ""
    rank, batch = next(iter(digests.items()))
    again = [str(other) for other, ranks in record.batches.items() if other != step and batch in ranks.values()]
    where = f", which step {', '.join(again[:3])}{' and others' if len(again) > 3 else ''} had too" if again else ""
    ranks = f" on rank {rank}, one of {len(digests)} ranks" if len(digests) > 1 else ""
    return f"; its batch is {batch.digest}{ranks}{where}"


def clipping_off(record: Record) -> Iterator[Finding]:
    """Yield the first checkpoint whose gradient is longer than a length that none before exceeded and half of them
    had. Second moments give lengths that exactly; of momentum see `dshistory.causes.momentum_findings`."""
    of_second = np.where(np.isfinite(record.momentum), np.nan, record.energy)
    with np.errstate(invalid="ignore"):
        total = np.sqrt(of_second.sum(axis=0))
    for at in range(7, len(total)):
        past = total[1:at][np.isfinite(total[1:at])]
        if len(past) < 6 or not total[at] > 0:
            continue
        limit = float(past.max())
        same = past > limit * (1 - _CLIPPED)
        if same.sum() >= max(6, len(past) / 2) and total[at] > limit * (1 + 10 * _CLIPPED):
            since, step = record.gap(at)
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
    by_buffer = log(record.driven)
    moved = record.beyond_buffers
    # What all weights do at once is not local, and its noise is no noise of theirs.
    common = moved - middle(moved.T)
    far = np.maximum(excess(moved, least=0.05), excess(common, least=0.05))
    # What momentum moves beyond its buffer is not the gradient's doing, however long that is.
    gradient = np.where(np.isfinite(by_buffer), 0.0, excess(log(record.energy), least=0.05))
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
        since, step = record.gap(at)
        ratio = math.exp(moved[rows[0], at] - float(middle(moved[rows[0], max(1, at - 5) : at])))
        group = _group_of(record, names)
        farther = [row for row, name in enumerate(record.weights) if name in group and far[row, at] > SEEN]
        elsewhere = [row for row, name in enumerate(record.weights) if name not in group and far[row, at] > SEEN]
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
            certain=bool(beyond[rows[0]]) and cause != "learning rate",  # that the metrics and the books tell
            surprise=float(far[rows[0], at]),
        )


def _farthest(far: Floats, gradient: Floats) -> list[int]:
    """Return the places whose weights moved farthest beside around that time, in order: those that are looked at more
    closely, since the groups of a checkpoint are a file of their own."""
    surprise = (far - np.maximum(gradient, 0.0)).max(axis=0, initial=0.0)
    alone = far.max(axis=0, initial=0.0)
    wanted = {*np.argsort(-surprise, kind="stable")[:_CLOSER], *np.argsort(-alone, kind="stable")[:_CLOSER]}
    return sorted(int(at) for at in wanted if at >= 2 and alone[at] > SEEN)


_CLOSER: Final = 24
_FARTHER: Final = math.log(2.5)
_MARGIN: Final = 1.5
"""Distances come from sketches, which are off by less than half (docs/sketches.md)."""


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
    moved = record.beyond_buffers
    for group in {tuple(group): group for group in groups if len(group) >= _MANY}.values():
        rows = [row for row, name in enumerate(record.weights) if name in set(group)]
        others = [row for row in range(len(record.weights)) if row not in set(rows)]
        if len(others) < _MANY or moved.shape[1] < 8:
            continue
        apart = middle(moved[rows].T) - middle(moved[others].T)
        far = excess(apart, least=_LEAST_LOG)
        at = int(np.argmax(far[3:])) + 3
        rise = float(apart[at] - middle(apart[max(1, at - 5) : at]))
        least = max(_GROUP_FARTHER, 2 * float(np.ptp(apart[1:at])))
        if far[at] > CLEAR_OF_MANY and rise > least and _is_once_or_stays(apart, at):
            since, step = record.gap(at)
            evidence = (
                f"the {len(rows)} weights of the group of {group[0]} moved {math.exp(rise):.3g} times as far as "
                f"before, beside the {len(others)} others"
            )
            cause, call = "learning rate of a group", f"h.diff({since}, {step})"
            yield Finding(cause, since, step, group, evidence, call, certain=False, surprise=float(far[at]))


def _is_once_or_stays(values: Floats, at: int) -> bool:
    """Return whether no value before a place is half as high as it, and either nearly all after it are, or none but the
    next: a rate is raised once or from then on, and what comes and goes is noise."""
    half = (values[at] + float(middle(values[max(1, at - 5) : at]))) / 2
    before, after = values[1:at] > half, values[at + 1 :] > half
    return not before.any() and (not after[1:].any() or bool(after.mean() > _STAYS))


_STAYS: Final = 0.8
"""All but what noise takes."""

_MANY: Final = 5
_GROUP_FARTHER: Final = math.log(1.3)


def growing_norms(record: Record) -> Iterator[Finding]:
    """Yield weights whose movement turns outwards within a checkpoint or two, far beside how its direction drifted
    before, and stays so.

    The share of the movement that is outward tells a weight that is driven to grow from one that grows as it learns,
    however the learning rate changes. A weight that is smaller than typical ones, as a bias that was born at zero, may
    grow."""
    numel = record.part("numel", record.weight_kind, record.weights)
    size = rms(record.norms**2, numel)
    is_small = size[:, -1] < typical_size(size, numel)[-1] / 2
    logarithms = log(record.norms)
    with np.errstate(invalid="ignore", divide="ignore"):
        outward = np.diff(record.norms, axis=1, prepend=np.nan) / record.moved
    for row, name in enumerate(record.weights):
        buckets = buckets_of(record.weight_kind, int(np.nan_to_num(numel[row, -1])))
        found = None if is_small[row] or not buckets else _turned_outward(outward[row], 1 / math.sqrt(2 * buckets))
        if found is None:
            continue
        at, surprise = found
        gained = float(logarithms[row, -1] - logarithms[row, at - 1])
        if gained > _GAINED:
            since, step = record.gap(at)
            evidence = (
                f"{name} grew {math.exp(gained):.3g}-fold from step {since} on: {outward[row, at + 1]:.0%} of its "
                f"movement is outward, {outward[row, at - 1]:.0%} right before"
            )
            call = f'h.trajectory("{name}", metric="norm")'
            yield Finding("norm grows", since, step, [name], evidence, call, certain=False, surprise=surprise)


def _turned_outward(shares: Floats, of_sketch: float) -> tuple[int, float] | None:
    """Return the first place from which on the outward share of a movement is large, and by how many standard
    deviations it left the line of those before; None where there is none. `of_sketch`: the standard deviation of a
    distance by sketches, as a share of it."""
    for at in range(_LEAST_PAST + 1, len(shares) - 2):
        before, after = shares[max(1, at - _PAST) : at], shares[at + 1 : at + 1 + _PAST]
        if not (after.min() > _OUTWARD > before.max()):
            continue
        drift = max(float(np.median(np.diff(before))), 0.0)
        own = max(AS_NORMAL * float(np.median(np.abs(np.diff(before, n=2)))), _LEAST_LOG)
        beyond = [
            (share - before[-1] - count * drift) / max(own, of_sketch * abs(share))
            for count, share in ((1, shares[at]), (2, after[0]))
        ]
        has_turned = beyond[0] > (SEEN if shares[at] > _OUTWARD else CLEAR_OF_MANY)
        if has_turned and beyond[1] > CLEAR_OF_MANY:
            return at, float(beyond[1])
    return None


_PAST: Final = 8
_LEAST_PAST: Final = 4
_GAINED: Final = math.log(1.02)
"""A norm that grows by less is as it was."""

_OUTWARD: Final = math.sqrt(0.5)
"""From here on a movement is more outward than sideways."""
