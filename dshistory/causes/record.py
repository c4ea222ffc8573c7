"""The record of a run, without reading a tensor: its metrics at every step, and statistics of its checkpoints.

The gradients' energy needs no gradient: from v' = b2 v + (1 - b2) g^2 the sums of a second moment over a tensor give

    E = (sum(v') - b2^k sum(v)) / (1 - b2^k)

the mean of |g|^2 over the k updates between two checkpoints, the latest weighing most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from catalog.history import History
from catalog.lineage_batches import lineage_batches
from catalog.lineage_metrics import lineage_metrics
from catalog.records import CheckpointRef
from catalog.references import committed_lineage
from dshistory.causes.rules import Rule, rules_of
from dshistory.metrics import Floats
from dshistory.tensors.checkpoint_tensors import CheckpointTensors
from dshistory.trends.statistics_matrix import StatisticsMatrix, Stored, analyzed

__all__ = ["Record", "Series"]

_PARTS: Final = ("squares", "sum", "numel", "nonfinite", "update_squares", "largest")
_OF_THE_MACHINE: Final = ("step_time_s", "stall_s")
"""Metrics that tell of the machine, not of the training."""
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
        with self.history.asking() as ask:
            return StatisticsMatrix(self.history, ask, self.refs, self.all_keys).stored()

    @cached_property
    def batches(self) -> Mapping[int, Mapping[int, str]]:
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
        sums = self.part("sum", "exp_avg_sq", self.weights)
        rules = self.rules(len(self.refs) - 1)
        betas = np.array([rules[name].betas[1] if name in rules else np.nan for name in self.weights])[:, np.newaxis]
        steps = np.array([ref.step for ref in self.analyzed], np.float64)
        between = np.diff(steps, prepend=np.nan)[np.newaxis]
        before = np.full_like(sums, np.nan)
        before[:, 1:] = sums[:, :-1]
        with np.errstate(invalid="ignore", divide="ignore"):
            energy: Floats = (sums - betas**between * before) / (1 - betas**between)
        return energy

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

    def reach(self, at: int) -> Floats:
        """Return the farthest that Adam can have moved each weight from the analyzed checkpoint before to the one at
        this place: (weights,), infinite where its rule is not known. Reads the groups of the two.

        By the inequality of Cauchy and Schwarz over all past gradients, |m| / sqrt(v) of an element is at most
        (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), whatever they are; decay adds its share of the weight."""
        reach = np.full(len(self.weights), np.inf)
        numel = self.part("numel", self.weight_kind, self.weights)[:, at]
        logged = self.metrics.get("lr", Series(np.zeros(0, np.int64), np.zeros(0)))
        since, step = self.analyzed[at - 1].step, self.analyzed[at].step
        both = [self.rules(place) for place in self.place_of_analyzed[at - 1 : at + 1]]
        firsts = [next(iter(rules.values())).lr if rules else 0.0 for rules in both]
        between = logged.values[(logged.steps > since) & (logged.steps <= step)]
        for row, name in enumerate(self.weights):
            told = [rules[name] for rules in both if name in rules]
            if len(told) < 2 or told[0].family != "adam":
                continue
            (b1, b2), lr = told[0].betas, max(rule.lr for rule in told)
            if not 0 < b1 * b1 < b2 < 1:
                continue
            times = max((rule.lr / first for rule, first in zip(told, firsts, strict=True) if first), default=1.0)
            rates = max(float(between.sum()) * times, lr if len(between) else lr * (step - since))
            most = (1 - b1) / np.sqrt((1 - b2) * (1 - b1 * b1 / b2)) / (1 - b1**10)
            decay = rates * max(rule.weight_decay for rule in told) * self.norms[row, at - 1]
            reach[row] = rates * most * np.sqrt(numel[row]) + decay
        return reach

    @cached_property
    def norms(self) -> Floats:
        """The norm of each weight: (weights, analyzed)."""
        return np.sqrt(self.part("squares", self.weight_kind, self.weights))
