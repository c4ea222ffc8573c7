"""The record of a run, without reading a tensor: its metrics at every step, and statistics of its checkpoints.

The gradients' energy needs no gradient: from v' = b2 v + (1 - b2) g^2 the sums of a second moment over a tensor give

    E = (sum(v') - b2^k sum(v)) / (1 - b2^k)

the mean of |g|^2 over the k updates between two checkpoints, the latest weighing most. The momentum of SGD,
b' = mu b + g, gives it from the norms of the buffers and of their difference, which sketches have:

    |b' - r b|^2 = (1 - r) (|b'|^2 - r |b|^2) + r |b' - b|^2     with r = mu^k
    E = |b' - r b|^2 / (1 + mu^2 + ... + mu^(2k - 2))

of one update exactly, and of several as far as their gradients are no two alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.history import History
from catalog.lineage_batches import Batch, lineage_batches
from catalog.lineage_metrics import lineage_metrics
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.causes.robust import log, middle
from dshistory.causes.rules import Rule, rules_of
from dshistory.metrics import Floats
from dshistory.tensors.checkpoint_tensors import CheckpointTensors
from dshistory.trends.statistics_matrix import StatisticsMatrix, Stored, analyzed

__all__ = ["Record", "Series"]

_PARTS: Final = ("squares", "sum", "numel", "nonfinite", "update_squares", "largest")
_OF_THE_MACHINE: Final = ("step_time_s", "stall_s")
"""Metrics that tell of the machine, not of the training."""
_PAST: Final = 8
"""So many checkpoints before one say what is usual."""

_RULES_READ: Final = 48
"""So many checkpoints, evenly spaced, are asked for the hyperparameters of their groups, and then those between two
that differ."""


@dataclass(frozen=True)
class Series:
    """A metric: its steps, ascending, and its values."""

    steps: npt.NDArray[np.int64]
    values: Floats


class Record:
    """The lineage `refs` of a run, all committed; `analyzed` are those of them that have statistics."""

    def __init__(self, history: History, run: str | None) -> None:
        self.history = history
        self.refs: Sequence[CheckpointRef] = committed_lineage(history.paths, run)
        self.keys: Sequence[tuple[str, str]] = []
        self._parts: Mapping[str, Floats] = {}
        with history.asking() as ask:
            self.analyzed = analyzed(ask, self.refs)
            if self.analyzed:
                matrix = StatisticsMatrix.all(history, ask, self.analyzed)
                self.keys, (_, self._parts) = matrix.keys, matrix.statistics(_PARTS)
        self.metrics: Mapping[str, Series] = {
            name: Series(np.array(list(values)), np.array(list(values.values()), np.float64))
            for name, values in lineage_metrics(history.paths, self.refs[-1].run).items()
            if name not in _OF_THE_MACHINE
        }
        self._rules: dict[int, Mapping[str, Rule]] = {}

    @cached_property
    def stored(self) -> Stored:
        """The content of the manifests, for `keys` over `refs`."""
        keys = self.all_keys  # it may ask too, and one who asks twice at a time waits for themselves
        with self.history.asking() as ask:
            return StatisticsMatrix(self.history, ask, self.refs, keys).stored()

    @cached_property
    def batches(self) -> Mapping[int, Mapping[int, Batch]]:
        """The digest of the batch of each step that has one, by step and rank."""
        return lineage_batches(self.history.paths, self.refs[-1].run)

    @cached_property
    def all_keys(self) -> Sequence[tuple[str, str]]:
        """The (kind, name) of every tensor of the lineage."""
        if self.keys:
            return self.keys
        with self.history.asking() as ask:
            return StatisticsMatrix.all(self.history, ask, self.refs).keys

    def part(self, name: str, kind: str, names: Sequence[str]) -> Floats:
        """Return a part of the statistics as (names, analyzed), NaN where it is unknown."""
        rows = {key: row for row, key in enumerate(self.keys)}
        found = np.full((len(names), len(self.analyzed)), np.nan)
        for place, one in enumerate(names):
            if (kind, one) in rows:
                found[place] = self._parts[name][rows[kind, one]]
        return found

    @cached_property
    def weights(self) -> Sequence[str]:
        """The names of the trained weights: those that an optimizer holds, or all where none is known."""
        held = self.rules(len(self.refs) - 1)
        return [name for kind, name in self.all_keys if kind == "model" and (not held or name in held)]

    @cached_property
    def weight_kind(self) -> str:
        """The kind whose tensors the optimizer moves: "master" where there are master weights."""
        return "master" if any(kind == "master" for kind, _ in self.all_keys) else "model"

    @cached_property
    def state_kinds(self) -> Mapping[str, Sequence[str]]:
        """The kinds of the optimizer's tensors for each weight, the one that gradients are added to first."""
        return {name: rule.kinds for name, rule in self.rules(len(self.refs) - 1).items() if rule.kinds}

    def rules(self, place: int) -> Mapping[str, Rule]:
        """Return the rule of every parameter at the checkpoint `refs[place]`."""
        if place not in self._rules:
            checkpoint = CheckpointTensors(self.history, self.refs[place], advance=lambda nbytes: None)
            self._rules[place] = rules_of(checkpoint)
        return self._rules[place]

    @cached_property
    def rule_changes(self) -> Sequence[int]:
        """The places of checkpoints whose groups have hyperparameters, learning rates aside, or a ratio of learning
        rates, unlike those of the checkpoint before; of two changes between two looks the first is found."""
        last = len(self.refs) - 1
        looks = sorted({round(at) for at in np.linspace(0, last, min(last + 1, _RULES_READ))})
        found = []
        for good, bad in pairwise(looks):
            if self._shape(good) == self._shape(bad):
                continue
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if self._shape(middle) == self._shape(good) else (good, middle)
            found.append(bad)
        return found

    def _shape(self, place: int) -> object:
        rules = self.rules(place)
        top = max((rule.lr for rule in rules.values()), default=0.0)
        return {
            name: (rule.betas, rule.eps, rule.weight_decay, rule.momentum, round(rule.lr / top, 6) if top else None)
            for name, rule in rules.items()
        }

    @cached_property
    def place_of_analyzed(self) -> Sequence[int]:
        """The place in `refs` of each analyzed checkpoint."""
        places = {ref: place for place, ref in enumerate(self.refs)}
        return [places[ref] for ref in self.analyzed]

    @cached_property
    def energy(self) -> Floats:
        """The mean of |g|^2 since the analyzed checkpoint before, by tensor: (weights, analyzed); NaN where it is
        unknown, below 0 where the second moment fell faster than it can."""
        rules = self.rules(len(self.refs) - 1)
        sums = self.part("sum", "exp_avg_sq", self.weights)
        betas = np.array([rules[name].betas[1] if name in rules else np.nan for name in self.weights])[:, np.newaxis]
        with np.errstate(invalid="ignore", divide="ignore"):
            of_second: Floats = (sums - betas**self._between * _before(sums)) / (1 - betas**self._between)
            weights = (1 - self.momentum ** (2 * self._between)) / (1 - self.momentum**2)
            of_buffer: Floats = self.added / weights / (1 - self._dampening) ** 2
        return np.where(np.isfinite(of_second), of_second, of_buffer)

    @cached_property
    def _between(self) -> Floats:
        """The number of steps since the analyzed checkpoint before: (1, analyzed)."""
        steps = np.array([ref.step for ref in self.analyzed], np.float64)
        return np.diff(steps, prepend=np.nan)[np.newaxis]

    @cached_property
    def momentum(self) -> Floats:
        """The momentum of each weight with a buffer: (weights, 1), NaN without one."""
        return self._of_momentum("momentum")

    @cached_property
    def has_coupled_decay(self) -> bool:
        """Whether Adam's second moments are of gradients to which weight decay was added."""
        rules = self.rules(len(self.refs) - 1).values()
        return any(rule.family == "adam" and rule.coupled_decay > 0 for rule in rules)

    @cached_property
    def _dampening(self) -> Floats:
        return self._of_momentum("dampening")

    def _of_momentum(self, field: str) -> Floats:
        rules = self.rules(len(self.refs) - 1)
        has_buffer = [name in rules and rules[name].kinds == ("momentum_buffer",) for name in self.weights]
        figures = [
            getattr(rules[name], field) if known else np.nan
            for name, known in zip(self.weights, has_buffer, strict=True)
        ]
        return np.array(figures, np.float64)[:, np.newaxis]

    @cached_property
    def buffers(self) -> Floats:
        """The squares of the momentum buffers: (weights, analyzed)."""
        return self.part("squares", "momentum_buffer", self.weights)

    @cached_property
    def kept(self) -> Floats:
        """The share of a momentum buffer that is left of it at the next analyzed checkpoint: mu^k, (weights,
        analyzed)."""
        return self.momentum**self._between

    @cached_property
    def added(self) -> Floats:
        """The squares of what came to a momentum buffer since the analyzed checkpoint before: (weights, analyzed)."""
        kept, moved = self.kept, self.part("update_squares", "momentum_buffer", self.weights)
        return np.maximum((1 - kept) * (self.buffers - kept * _before(self.buffers)) + kept * moved, 0.0)

    @cached_property
    def turned(self) -> Floats:
        """The cosine of what came to all momentum buffers together with what was in them: (analyzed,)."""
        before = _before(self.buffers)
        moved = self.part("update_squares", "momentum_buffer", self.weights)
        along = (self.buffers + before - moved) / 2 - self.kept * before
        with np.errstate(invalid="ignore", divide="ignore"):
            both = np.nansum(np.where(np.isfinite(along), before, 0.0), axis=0), np.nansum(self.added, axis=0)
            cosine: Floats = np.nansum(along, axis=0) / np.sqrt(both[0] * both[1])
        return cosine

    @cached_property
    def gone(self) -> npt.NDArray[np.bool_]:
        """Where what came is against all momentum buffers together, and less than half is left in them of what must be
        besides what usually comes along them: (analyzed,); False where there are no buffers."""
        kept = self.kept[np.isfinite(self.momentum[:, 0])]
        if not len(kept):
            return np.zeros(len(self.analyzed), np.bool_)
        with np.errstate(invalid="ignore", divide="ignore"):
            added, before = (np.nansum(part, axis=0) for part in (self.added, _before(self.buffers)))
            came = self.turned * np.sqrt(added / before)
            usual = np.array([middle(came[max(2, at - _PAST) : at]) if at > 2 else np.nan for at in range(len(came))])
            found: npt.NDArray[np.bool_] = (self.turned < 0) & (came - usual < -kept[0] / 2)
        return found

    @cached_property
    def moved(self) -> Floats:
        """The norm of the update since the checkpoint before, by tensor: (weights, analyzed)."""
        squares = self.part("update_squares", self.weight_kind, self.weights)
        return np.sqrt(squares)

    @cached_property
    def pace(self) -> Floats:
        """The sum of the logged learning rates since the checkpoint before, over their mean: (analyzed,); 1 where it is
        not known."""
        logged = self.metrics.get("lr")
        steps = np.array([ref.step for ref in self.analyzed])
        if logged is None or len(steps) < 2:
            return np.ones(len(steps))
        sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(logged.values))])
        totals = sums[np.searchsorted(logged.steps, steps, side="right")]
        between = np.diff(totals, prepend=np.nan)
        usual = np.nanmean(between)
        return np.where(between > 0, between / usual, 1.0) if usual > 0 else np.ones(len(steps))

    @cached_property
    def driven(self) -> Floats:
        """How far momentum buffers move their weights, in a unit of its own for each number of updates: the mean of
        their lengths at both ends times the learning rates between, (weights, analyzed); NaN without a buffer. What
        Adam divides by is as long as the gradients are, so how far it goes hardly follows from its state."""
        both = np.fmax(self.buffers + _before(self.buffers), self.buffers)
        return np.sqrt(both / 2) * self.pace

    @cached_property
    def beyond_buffers(self) -> Floats:
        """The logarithm of how far each weight moved, beside how far its buffer drives it where it has one: (weights,
        analyzed)."""
        return log(self.moved) - np.nan_to_num(log(self.driven))

    def gap(self, at: int) -> tuple[int, int]:
        """Return the steps of the analyzed checkpoint before this place and of the one at it."""
        return (self.analyzed[at - 1].step if at else self.analyzed[at].step - 1), self.analyzed[at].step

    def reach(self, at: int) -> Floats:
        """Return the farthest that the optimizer can have moved each weight from the analyzed checkpoint before to the
        one at this place: (weights,), infinite where that is not known. Reads the groups of the two.

        Adam: by the inequality of Cauchy and Schwarz over all past gradients, |m| / sqrt(v) of an element is at most
        (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), whatever they are; decay adds its share of the weight. SGD: one
        update goes as far as the buffer after it is long, or with Nesterov that and the gradient."""
        reach = np.full(len(self.weights), np.inf)
        numel = self.part("numel", self.weight_kind, self.weights)[:, at]
        logged = self.metrics.get("lr", Series(np.zeros(0, np.int64), np.zeros(0)))
        since, step = self.analyzed[at - 1].step, self.analyzed[at].step
        both = [self.rules(place) for place in self.place_of_analyzed[at - 1 : at + 1]]
        firsts = [next(iter(rules.values())).lr if rules else 0.0 for rules in both]
        between = logged.values[(logged.steps > since) & (logged.steps <= step)]
        for row, name in enumerate(self.weights):
            told = [rules[name] for rules in both if name in rules]
            if len(told) < 2 or not told[0].kinds:
                continue
            lr = max(rule.lr for rule in told)
            times = max((rule.lr / first for rule, first in zip(told, firsts, strict=True) if first), default=1.0)
            rates = max(float(between.sum()) * times, lr if len(between) else lr * (step - since))
            if told[0].family == "sgd":
                if step - since == 1:
                    gradient = np.sqrt(self.added[row, at]) if told[0].nesterov else 0.0
                    reach[row] = rates * (np.sqrt(self.buffers[row, at]) + gradient)
                continue
            (b1, b2) = told[0].betas
            if not 0 < b1 * b1 < b2 < 1:
                continue
            most = (1 - b1) / np.sqrt((1 - b2) * (1 - b1 * b1 / b2)) / (1 - b1**10)
            decay = rates * max(rule.weight_decay for rule in told) * self.norms[row, at - 1]
            reach[row] = rates * most * np.sqrt(numel[row]) + decay
        return reach

    @cached_property
    def norms(self) -> Floats:
        """The norm of each weight: (weights, analyzed)."""
        return np.sqrt(self.part("squares", self.weight_kind, self.weights))


def _before(values: Floats) -> Floats:
    """Return the values of the checkpoint before, NaN for the first: (any, checkpoints)."""
    found = np.full_like(values, np.nan)
    found[:, 1:] = values[:, :-1]
    return found
