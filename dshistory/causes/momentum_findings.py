"""The findings where no second moment tells how long gradients are: in momentum buffers, and under weight decay that is
added to gradients.

Buffers that were emptied or exchanged show as a gradient that undoes what was in them, while the loss of its batch is
as ordinary as any. A limit on the length of gradients that is gone shows as gradients of all weights that are longer
from then on; of single updates, the exact lengths say whether there was one.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from dshistory.causes.audit import audit
from dshistory.causes.findings import Finding
from dshistory.causes.record import Record
from dshistory.causes.robust import CLEAR, CLEAR_LOSS, CLEAR_OF_MANY, SEEN, excess, log, middle
from dshistory.metrics import AS_NORMAL, Floats
from dshistory.trends.distances import step_distances

__all__ = ["buffers_replaced", "gradients_longer"]

_LEAST: Final = 0.02
"""A cosine, or a logarithm, that deviates by this much counts as steady."""

_PAST: Final = 8
_LEAST_PAST: Final = 5
_LASTS: Final = 3
_APART: Final = 2
"""Checkpoints nearer than this are alike anyway."""

_CLIPPED: Final = 2e-3
"""Clipped lengths are equal but for the rounding of float32 and of what clipping adds to the length before it
divides."""


def buffers_replaced(record: Record) -> Iterator[Finding]:
    """Yield the checkpoint whose momentum buffers forgot what they were, if there is one.

    What came to them undoes what was in them (`turned`), and the weights go less far than they would drive them: the
    two are judged together, as the sum of their squares. Buffers much longer than usual ones are foreign where nothing
    is left in them of what they were (`Record.gone`)."""
    if not np.isfinite(record.turned).any():
        return
    total = _total(record.energy)
    longer = excess(log(total), least=_LEAST)
    against = np.minimum(excess(record.turned, least=_LEAST, at_once=True), 0.0)
    held_back = np.minimum(excess(_beside_buffers(record), least=_LEAST, at_once=True), 0.0)
    both = np.hypot(against, held_back)
    alone = longer > 2 * np.append(longer[1:], 0.0)
    spike = np.where(record.gone & (longer > CLEAR) & alone, longer, 0.0)
    surprise = np.where(both > CLEAR_OF_MANY, np.maximum(both, spike), spike)
    surprise[:3] = 0.0
    surprise[_of_loss(record) > CLEAR_LOSS] = 0.0
    at = int(np.argmax(surprise))
    if not surprise[at] > 0:
        return
    since, step = record.gap(at)
    lengths = np.sqrt(_total(record.buffers))
    usual = float(middle(total[max(2, at - _PAST) : at]))
    momentum = float(np.nanmedian(record.momentum))
    from_zero = math.sqrt(usual * sum(momentum ** (2 * ago) for ago in range(step - since)))
    # After one update the length tells; after several, how far the weights went, and what the buffers are like.
    several = step - since > 1
    is_shorter = several and lengths[at] < lengths[at - 1] and held_back[at] < -CLEAR_OF_MANY
    source = _source(record, at) if several else None
    is_reset = source is None and (is_shorter or lengths[at] < math.sqrt(from_zero * lengths[at - 1]))
    evidence = (
        f"the momentum buffers were {lengths[at - 1]:.4g} long and are {lengths[at]:.4g}, and point elsewhere, as "
        f"after a gradient of {math.sqrt(total[at]):.4g} against them (cosine {record.turned[at]:.2g}); usual ones are "
        f"{math.sqrt(usual):.4g} long, and the loss was as usual"
    )
    if source is not None:
        evidence += f"; they resemble those of step {source}"
    cause = "optimizer state reset" if is_reset else "foreign optimizer state"
    call = f'h.diff({since}, {step}, kinds="momentum_buffer")'
    yield Finding(cause, since, step, (), evidence, call, certain=False, surprise=float(surprise[at]))


def _beside_buffers(record: Record) -> Floats:
    """Return the logarithm of how far all weights that moved went, beside how far their buffers drive them:
    (analyzed,); NaN where the learning rates are not known."""
    if "lr" not in record.metrics:
        return np.full(len(record.analyzed), np.nan)
    known = np.isfinite(record.driven) & (record.moved > 0)
    moved, driven = (_total(np.where(known, part, np.nan) ** 2) for part in (record.moved, record.driven))
    return log(moved) / 2 - log(driven) / 2


def _source(record: Record, at: int) -> int | None:
    """Return the step of an earlier checkpoint whose momentum buffers those at this place resemble, more than the
    gradients right before and after do; None where there is none. Reads the sketches of all buffers."""
    table = step_distances(record.history, run=record.refs[-1].run, names="*", kinds="momentum_buffer")
    known = [place for place, ref in enumerate(record.analyzed) if ref in table.refs]
    if at not in known or known.index(at) < _LEAST_PAST:
        return None
    of_table = [table.refs.index(record.analyzed[place]) for place in known]
    squares, kept = _total(record.buffers)[known], record.kept[np.isfinite(record.momentum[:, 0])][0, known]
    products = (squares[:, None] + squares - table.squares[np.ix_(of_table, of_table)]) / 2
    lengths = np.sqrt(squares)
    with np.errstate(invalid="ignore", divide="ignore"):
        came = (
            (products[1:] - kept[1:, None] * products[:-1]) / np.sqrt(_total(record.added)[known])[1:, None] / lengths
        )
    now = known.index(at)
    beside = [row for row in (now - 2, now) if row < len(came)]  # row i is what came to checkpoint i + 1
    others = [row for row in range(_APART, len(came)) if row not in (now - 1, now)]
    usual = np.concatenate([(came[row] - came[row - 1])[: row - _APART + 1] for row in others])
    spread = max(AS_NORMAL * float(np.nanmedian(np.abs(usual))), _LEAST)
    alike = products[now, : now - _APART] / (lengths[now] * lengths[: now - _APART])
    rises = np.nan_to_num((alike - came[beside, : now - _APART].max(axis=0)) / spread)
    return table.refs[of_table[int(np.argmax(rises))]].step if rises.max(initial=0.0) > SEEN else None


def gradients_longer(record: Record) -> Iterator[Finding]:
    """Yield the checkpoint since which the gradients of nearly all weights are longer than all before, by more than
    those differed, while the loss was as usual: of momentum, or of Adam's moments that have weight decay in them."""
    is_told_so = record.has_coupled_decay | np.isfinite(record.momentum)
    energy = np.where(is_told_so, record.energy, np.nan)
    total = log(_total(energy)) / 2
    surprise_of_loss = _of_loss(record)
    for at in range(_LEAST_PAST + 2, len(total)):
        before, after = total[2:at], total[at : at + _LASTS]
        step, jump = float(after.min() - before.max()), float(total[at] - total[at - 1])
        usual = max(AS_NORMAL * float(np.median(np.abs(np.diff(before[-_PAST:])))), _LEAST)
        stays = step > jump / 2 > 0 and jump > float(np.ptp(before))
        if not stays or not jump > CLEAR_OF_MANY * usual or surprise_of_loss[at] > SEEN:
            continue
        apart = log(energy[:, at]) / 2 - log(middle(energy[:, max(2, at - _PAST) : at])) / 2
        known = np.isfinite(apart)
        if known.sum() and (apart[known] > step / 2).mean() > _NEARLY_ALL:
            yield from _was_limited(record, at, jump / usual)
            return


_NEARLY_ALL: Final = 0.8


def _was_limited(record: Record, at: int, surprise: float) -> Iterator[Finding]:
    since, step = record.gap(at)
    places = range(max(1, at - _PAST), at + 1)
    lengths = [_length(record, place) for place in places]
    exact = [length for length in lengths[:-1] if length is not None]
    if exact and lengths[-1] is not None:
        limit = max(exact)
        same = sum(length > limit * (1 - _CLIPPED) for length in exact)
        if same < len(exact) / 2 or not lengths[-1] > limit * (1 + 10 * _CLIPPED):
            return
        evidence = (
            f"the gradient is {lengths[-1]:.4g} long; {same} of the {len(exact)} before were {limit:.4g} long, as "
            "clipping makes them, and none was longer"
        )
        yield Finding("clipping off", since, step, (), evidence, f"h.audit({since}, {step})")
        return
    roots = np.sqrt(_total(record.energy))
    evidence = (
        f"the gradients of nearly all weights are {roots[at] / roots[at - 1]:.3g} times as long from then on, and "
        "longer than all before, which hardly differed; the loss was as usual"
    )
    kind = "exp_avg_sq" if record.has_coupled_decay else "momentum_buffer"
    call = f'h.trajectory("*", kinds="{kind}", metric="norm")'
    yield Finding("clipping off", since, step, (), evidence, call, certain=False, surprise=float(surprise))


def _length(record: Record, at: int) -> float | None:
    """Return the exact length of the gradient of the one update before this checkpoint, None where there were several.
    Reads its tensors."""
    before, after = record.analyzed[at - 1 : at + 1]
    if after.step - before.step != 1:
        return None
    norms = [row["gradient_norm"] for row in audit(record.history, before, after, names="*", quiet=True)]
    squares = [norm * norm for norm in norms if norm is not None]
    return math.sqrt(sum(squares)) if squares else None


def _of_loss(record: Record) -> Floats:
    """Return the largest surprise of the losses of the steps between each checkpoint and the one before: (analyzed,),
    0 where there is no loss."""
    series = record.metrics.get("loss")
    found = np.zeros(len(record.analyzed))
    if series is None:
        return found
    surprise = excess(log(series.values), least=_LEAST)
    for at in range(1, len(found)):
        since, step = record.gap(at)
        inside = (series.steps > since) & (series.steps <= step)
        found[at] = surprise[inside].max(initial=0.0)
    return found


def _total(parts: Floats) -> Floats:
    """Return the sum over all weights: (analyzed,)."""
    total: Floats = np.nansum(parts, axis=0)
    return total
