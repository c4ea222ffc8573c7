"""The sums by which an optimizer's books are balanced: one parameter over one update, or over several.

One Adam update from (w, m, v) to (w', m', v'), with the gradient g that it consumed:

    m' = b1 m + (1 - b1) g                  so  g = (m' - b1 m) / (1 - b1)
    v' = b2 v + (1 - b2) g^2                which the second moment must therefore agree with
    w' = w - lr u - lr decay w              with u = (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)

(Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101). The first moment, corrected for its start at
zero, is the mean of recent gradients, the second one their mean square: so |g - mean| is the noise of a gradient, and
sum(mean^2) / sum(mean square - mean^2) the signal to noise of the gradients (Balles and Hennig, arXiv:1705.07774). The
learning rate and the decay that really acted are the least squares solution of the last line. With the momentum of SGD,
u is the buffer, or with Nesterov g + momentum times the buffer. Where decay is added to the gradient, as in SGD, g has
it, and the norm that is reported has not. Over several updates no gradient can be recovered, but
v' >= b2^k v always holds.

What the arithmetic may be off by follows from the formats alone: each operation rounds by at most the unit roundoff of
the coarsest dtype that takes part, or by half the distance of its smallest numbers, which in float16 are as large as
gradients (`Rounding`). All bounds are worst cases, so what exceeds them was not the optimizer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from dshistory.causes.rules import Rule

__all__ = ["CHUNK_NUMEL", "AdamBooks", "MomentumBooks", "Movement", "Rounding"]

CHUNK_NUMEL = 1 << 15
"""Few enough that all arrays of a chunk stay in a core's cache, and that torch stays in the calling thread."""

_PARALLEL = 1e-9
"""The square of the sine of the angle at which step and weights count as parallel: decay can't be told from them."""

_SMALLEST = 1e-30
"""Values below this are where single precision itself ends, and what a kernel does with them is its own affair: nothing
is said about them."""

_OF_SUMS = 1e-7
"""The share of a movement that a difference of sums in float64 can't tell from nothing."""

_WEIGHT_ROUNDINGS = 2
_STEP_ROUNDINGS = 8
_MOMENT_ROUNDINGS = 4
"""Operations on the way to a weight, to its step, and to a moment, in the implementations of torch and DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """One rounding is off by at most the share `unit` of a value, or by `least` where the value is smaller than
    `normal`, the smallest that has the full precision."""

    unit: float
    least: float
    normal: float

    @classmethod
    def of(cls, dtypes: Sequence[torch.dtype]) -> Self:
        """Return the rounding of the coarsest of these dtypes."""
        formats = [torch.finfo(dtype) for dtype in dtypes]
        return cls(
            unit=max(one.eps for one in formats) / 2,
            least=max(_SMALLEST, *(one.smallest_normal * one.eps / 2 for one in formats)),
            normal=max(one.smallest_normal for one in formats),
        )


@dataclass(slots=True)
class Movement:
    """Least squares of a movement w' - w against the step u and the weights w themselves, as sums. `step_drift`: the
    share of the step that it may be off by beside the rounding of its operations."""

    rounding: Rounding
    step_drift: float = 0.0
    numel: int = 0
    uncertain: float = 0.0
    uu: float = 0.0
    uw: float = 0.0
    ww: float = 0.0
    du: float = 0.0
    dw: float = 0.0
    dd: float = 0.0
    sizes: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, step: torch.Tensor, unsure: torch.Tensor) -> None:
        """Add flat float64 chunks of equal length; `unsure` says of which elements the step is not known."""
        moved = after - before
        self.numel += moved.numel()
        self.uncertain += float(step[unsure].square().sum())
        self.uu += float(step.dot(step))
        self.uw += float(step.dot(before))
        self.ww += float(before.dot(before))
        self.du += float(moved.dot(step))
        self.dw += float(moved.dot(before))
        self.dd += float(moved.dot(moved))
        self.sizes += float(before.abs().add_(after.abs()).square_().sum())

    def error(self, lr: float) -> float:
        """Return the norm of what the arithmetic of an update with this learning rate may be off by, at most."""
        of_weights, of_step = self.sizes**0.5, abs(lr) * self.uu**0.5
        rounded = self.rounding.unit * (_WEIGHT_ROUNDINGS * of_weights + _STEP_ROUNDINGS * of_step)
        rounded += self.step_drift * of_step
        operations = _WEIGHT_ROUNDINGS + _STEP_ROUNDINGS * abs(lr)
        unknown = abs(lr) * self.uncertain**0.5 + self.rounding.least * operations * self.numel**0.5
        return float(rounded + unknown + _OF_SUMS * self.norm)

    @property
    def norm(self) -> float:
        """The norm of the movement."""
        return float(self.dd**0.5)

    def solved(self) -> tuple[float | None, float | None]:
        """Return the learning rate and the share that the tensor lost of itself; None where they can't be told."""
        across = self.uu * self.ww - self.uw * self.uw
        if across <= _PARALLEL * self.uu * self.ww:
            return None, None
        lr = -(self.du * self.ww - self.dw * self.uw) / across
        return lr, -(self.dw * self.uu - self.du * self.uw) / across

    def alone(self, lr: float, decay: float) -> tuple[float | None, float | None]:
        """Return the two figures of `solved`, each as it follows when the other is this one; they are more exact where
        step and weights are nearly parallel."""
        return (
            -(self.du + decay * self.uw) / self.uu if self.uu else None,
            -(self.dw + lr * self.uw) / self.ww if self.ww else None,
        )

    def errors(self, lr: float) -> tuple[float, float]:
        """Return what the two figures of `solved` may be off by, at most, in an update with this learning rate."""
        error = self.error(lr)
        across = self.uu * self.ww - self.uw * self.uw
        if across <= _PARALLEL * self.uu * self.ww:
            return (error / self.uu**0.5 if self.uu else math.inf), math.inf
        return error * (self.ww / across) ** 0.5, error * (self.uu / across) ** 0.5

    def unexplained(self, lr: float, decay: float) -> float:
        """Return the norm of the movement that this learning rate and this decay leave over."""
        squares = (
            self.dd
            + lr * lr * self.uu
            + decay * decay * self.ww
            + 2 * lr * self.du
            + 2 * decay * self.dw
            + 2 * lr * decay * self.uw
        )
        return float(max(squares, 0.0) ** 0.5)


@dataclass(slots=True)
class AdamBooks:
    """The sums of one parameter under Adam or AdamW over `updates` updates; `count` is their number after the last."""

    rule: Rule
    updates: int
    count: int
    rounding: Rounding
    movement: Movement = field(init=False)
    gradient_squares: float = 0.0
    noise_squares: float = 0.0
    signal: float = 0.0
    spread: float = 0.0
    second: float = 0.0
    second_expected: float = 0.0
    fell_too_fast: int = 0
    disagree: int = 0

    def __post_init__(self) -> None:
        self.movement = Movement(self.rounding, self._drift_of_powers())

    def _drift_of_powers(self) -> float:
        """Return the share of the step by which running products of betas in float32 may move it: each factor of b^t
        rounds, and 1 - b^t is as far off as b^t itself."""
        if not self.rule.in_float32 or not self.rule.bias_correction:
            return 0.0
        powers = [beta**self.count for beta in self.rule.betas]
        first, second = (self.count * power / (1 - power) if power < 1 else math.inf for power in powers)
        return Rounding.of([torch.float32]).unit * (first + second / 2)

    def _correction(self, beta: float, count: int | None = None) -> float:
        return 1 - beta ** (self.count if count is None else count) if self.rule.bias_correction else 1.0

    def add(self, chunks: Sequence[torch.Tensor]) -> None:
        """Add flat float64 chunks of equal length: the weights before and after, both moments before and after, and
        amsgrad's largest second moment after."""
        weights, first, second, largest = chunks[:2], chunks[2:4], chunks[4:6], chunks[6:]
        b1, b2 = self.rule.betas
        unit, off = self.rounding.unit, _MOMENT_ROUNDINGS * self.rounding.least
        slack = 2 * _MOMENT_ROUNDINGS * self.updates * unit
        lowest = second[0] * (b2**self.updates * (1 - slack)) - off * self.updates
        self.fell_too_fast += int((second[1] < lowest).sum())
        if self.updates != 1:
            return
        gradient = (first[1] - b1 * first[0]).div_(1 - b1)
        error = (first[1].abs() + first[0].abs()).mul_(_MOMENT_ROUNDINGS * unit).add_(off).div_(1 - b1)
        squares = gradient.square()
        self.gradient_squares += _squares_without_decay(gradient, weights[0], self.rule)
        expected = b2 * second[0] + (1 - b2) * squares
        allowed = (gradient.abs() * 2 + error).mul_(error).mul_(1 - b2)
        allowed += (second[0] + second[1]).mul_(_MOMENT_ROUNDINGS * unit) + off
        self.disagree += int(((second[1] - expected).abs() > allowed).sum())
        self.second += float(second[1].sum())
        self.second_expected += float(expected.sum())
        usual = first[0] / self._correction(b1, self.count - 1) if self.count > 1 else torch.zeros_like(gradient)
        self.noise_squares += float((gradient - usual).square_().sum())
        mean_squares = (first[1] / self._correction(b1)).square_()
        self.signal += float(mean_squares.sum())
        self.spread += float((second[1] / self._correction(b2) - mean_squares).clamp_(min=0).sum())
        root = ((largest[0] if largest else second[1]) / self._correction(b2)).sqrt_().add_(self.rule.eps)
        step = (first[1] / self._correction(b1)).div_(root)
        self.movement.add(weights[0], weights[1], step, (first[1].abs() < _SMALLEST) | (root < self.rounding.normal))


@dataclass(slots=True)
class MomentumBooks:
    """The sums of one parameter under SGD with momentum over one update."""

    rule: Rule
    rounding: Rounding
    movement: Movement = field(init=False)
    gradient_squares: float = 0.0

    def __post_init__(self) -> None:
        self.movement = Movement(self.rounding)

    def add(self, chunks: Sequence[torch.Tensor]) -> None:
        """Add flat float64 chunks of equal length: weights and momentum buffer, each before and after."""
        weights, buffer = chunks[:2], chunks[2:]
        momentum = self.rule.momentum
        gradient = (buffer[1] - momentum * buffer[0]).div_(1 - self.rule.dampening)
        self.gradient_squares += _squares_without_decay(gradient, weights[0], self.rule)
        step = gradient + momentum * buffer[1] if self.rule.nesterov else buffer[1]
        self.movement.add(weights[0], weights[1], step, buffer[1].abs() < _SMALLEST)


def _squares_without_decay(gradient: torch.Tensor, weights: torch.Tensor, rule: Rule) -> float:
    """Return the squares of a gradient that an update consumed, as it was before the weights' decay was added to it."""
    bare = gradient - rule.coupled_decay * weights if rule.coupled_decay else gradient
    return float(bare.dot(bare))
