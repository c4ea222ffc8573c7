"""Tiny trainings with one planted cause each, or with none: what `diagnose` is measured on.

A case is drawn from its number alone: the model (a GPT or an MLP), the optimizer, the schedule, the step at which the
cause sets in, and the tensors that it hits. A training takes about a second.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import torch

import capture

__all__ = ["CAUSES", "OPTIMIZERS", "Case", "Truth", "train"]

_VOCABULARY: Final = 48
_WIDTH: Final = 32
_CONTEXT: Final = 12
_FEATURES: Final = 16


@dataclass(frozen=True)
class Case:
    """One training. `cause` is a key of CAUSES, `every` the distance of its checkpoints, `optimizer` a key of
    OPTIMIZERS."""

    cause: str
    loud: bool
    every: int
    seed: int
    optimizer: str = "AdamW"


@dataclass(frozen=True)
class Truth:
    """What was planted: the step whose update is the first with it, and the tensors that it hit; no tensor stands for
    all of them. Both are None and empty where nothing was planted. `gradual`: how many steps later it may be seen."""

    step: int | None = None
    tensors: Collection[str] = ()
    gradual: int = 0


class Block(torch.nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, activation: type[torch.nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(_WIDTH), torch.nn.LayerNorm(_WIDTH)
        self.qkv, self.proj = torch.nn.Linear(_WIDTH, 3 * _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.Linear(4 * _WIDTH, _WIDTH)
        self.activation = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, _WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """Returns its own loss on (tokens, targets)."""

    def __init__(self, layers: int, activation: type[torch.nn.Module]) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = torch.nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = torch.nn.ModuleList(Block(activation) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(_WIDTH), torch.nn.Linear(_WIDTH, _VOCABULARY)
        for embedding in (self.tokens, self.places):
            torch.nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class MLP(torch.nn.Module):
    """Returns its own loss on (inputs, targets)."""

    def __init__(self, layers: int, activation: type[torch.nn.Module]) -> None:
        super().__init__()
        sizes = [_FEATURES, *[64] * layers]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(before, after) for before, after in pairwise(sizes))
        self.activation, self.head = activation(), torch.nn.Linear(64, 8)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = self.activation(layer(inputs))
        return torch.nn.functional.cross_entropy(self.head(inputs).float(), targets)


@dataclass
class Training:
    """A training under way, as the plants see it. `draw` decides everything that is random about the case."""

    case: Case
    draw: torch.Generator
    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    steps: int
    at: int
    clip: float | None
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    before_update: list[Callable[[int], None]] = field(default_factory=list)

    @classmethod
    def drawn(cls, case: Case) -> Self:
        """Draw a training by the number of the case."""
        draw = torch.Generator().manual_seed(case.seed)
        torch.manual_seed(case.seed)

        def one_of(*choices: Any) -> Any:
            return choices[_whole(draw, len(choices))]

        is_gpt = case.cause == "embedding row" or one_of(True, False)
        activation = torch.nn.ReLU if case.cause == "dead units" else one_of(torch.nn.ReLU, torch.nn.GELU)
        layers = one_of(3, 4) if case.cause == "layers swapped" else one_of(2, 3, 4)
        model = GPT(layers, activation) if is_gpt else MLP(layers, activation)
        rate = one_of(1e-3, 2e-3, 3e-3)
        if case.cause == "updates vanish":
            model, rate = model.to(torch.bfloat16), 1e-6 if case.loud else 2e-5
        steps = one_of(40, 50, 60) if case.every == 1 else 20 * case.every if case.every < 10 else 140
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        make, times, decay = OPTIMIZERS[case.optimizer]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = make(groups, rate * times, one_of(0.95, 0.99, 0.999))
        schedules: list[Callable[[int], float]] = [
            lambda step: 1.0,
            lambda step: min(1.0, (step + 1) / 10),
            lambda step: min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
            lambda step: 0.3 ** (2 * step // steps),
        ]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, one_of(*schedules))
        at = steps // 2 + _whole(draw, steps // 4) + (1 if case.every == 1 else 0)
        clip = (0.05 if case.loud else 0.3) if case.cause == "clipping off" else one_of(None, 1.0)
        batch = _sentences(draw) if is_gpt else _points(draw, one_of(32, 64))
        if case.cause == "updates vanish" and not is_gpt:
            of_single = batch
            batch = lambda step: (of_single(step)[0].bfloat16(), of_single(step)[1])  # noqa: E731
        return cls(case, draw, model, optimizer, scheduler, steps, at, clip, batch)

    def named(self, *, least_ndim: int = 1, last: str = "") -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters in the middle of the model, by name: those of its repeated layers."""
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if ("blocks." in name or "layers." in name) and parameter.ndim >= least_ndim and name.endswith(last)
        ]

    def pick(self, *, least_ndim: int = 1, last: str = "") -> tuple[str, torch.nn.Parameter]:
        """Draw one of `named`."""
        choices = self.named(least_ndim=least_ndim, last=last)
        return choices[_whole(self.draw, len(choices))]

    def plant(self, step: int) -> None:
        """Do what was planted, right before the update of a step."""
        for plant in self.before_update:
            plant(step)

    def once(self, plant: Callable[[], object]) -> None:
        """Run it right before the update of the step of the cause."""
        self.before_update.append(lambda step: plant() if step == self.at else None)


def train(folder: Path, case: Case) -> Truth:
    """Train a case under capture, into the history in `folder`, whose statistics are not computed yet."""
    training = Training.drawn(case)
    truth = CAUSES[case.cause](training)
    model, optimizer, scheduler = training.model, training.optimizer, training.scheduler
    now = [0]
    # Hooks of the optimizer run between the barrier and the update, so a snapshot never holds half a plant.
    optimizer.register_step_pre_hook(lambda *_: training.plant(now[0]))
    with capture.enable(
        model, optimizer=optimizer, scheduler=scheduler, every=case.every, history=folder, stats_every=0
    ):
        for now[0] in range(1, training.steps + 1):
            loss = model(*training.batch(now[0]))
            optimizer.zero_grad()
            loss.backward()
            if training.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            optimizer.step()
            scheduler.step()
    return truth


def _whole(draw: torch.Generator, below: int) -> int:
    return int(torch.randint(below, (), generator=draw))


def _sentences(draw: torch.Generator) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of a language in which each token has four successors."""
    successors = torch.randint(_VOCABULARY, (_VOCABULARY, 4), generator=draw)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = [torch.randint(_VOCABULARY, (16,), generator=draw)]
        for _ in range(_CONTEXT):
            words.append(successors[words[-1], torch.randint(4, (16,), generator=draw)])
        text = torch.stack(words, dim=1)
        return text[:, :-1], text[:, 1:]

    return batch


def _points(draw: torch.Generator, count: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of points whose class a random linear map decides."""
    teacher = torch.randn(_FEATURES, 8, generator=draw)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, _FEATURES, generator=draw)
        return inputs, (inputs @ teacher).argmax(dim=1)

    return batch


OPTIMIZERS: Final[dict[str, tuple[Callable[[Any, float, float], torch.optim.Optimizer], float, float]]] = {
    "AdamW": (lambda groups, lr, beta2: torch.optim.AdamW(groups, lr=lr, betas=(0.9, beta2)), 1.0, 0.1),
    "Adam": (lambda groups, lr, beta2: torch.optim.Adam(groups, lr=lr, betas=(0.9, beta2)), 1.0, 1e-3),
    "SGD": (lambda groups, lr, _: torch.optim.SGD(groups, lr=lr, momentum=0.9), 20.0, 5e-3),
}
"""Each with how many times Adam's learning rates it has, and the weight decay of its matrices."""

# Each plant changes the training and returns the truth about it.


def _nothing(training: Training) -> Truth:
    return Truth()


def _bad_batch(training: Training) -> Truth:
    good = training.batch

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = good(step)
        if step != training.at:
            return inputs, targets
        if not inputs.is_floating_point():  # noise; or one word again and again, followed by what never follows it
            noise = torch.randint(_VOCABULARY, targets.shape, generator=training.draw)
            return (torch.full_like(inputs, 7), torch.full_like(targets, 7)) if training.case.loud else (inputs, noise)
        return inputs * (30 if training.case.loud else 4), targets.roll(1)

    training.batch = batch
    return Truth(training.at)


def _rates(training: Training, *groups: int) -> None:
    """Raise the rates of these groups for the one update, or from there on."""
    factor, lasts = (100.0 if training.case.loud else 4.0), bool(_whole(training.draw, 2))

    def plant() -> None:
        for number in groups:
            training.optimizer.param_groups[number]["lr"] *= factor
            if lasts:
                training.scheduler.base_lrs[number] *= factor

    training.once(plant)


def _learning_rate(training: Training) -> Truth:
    _rates(training, 0, 1)
    return Truth(training.at)


def _group_rate(training: Training) -> Truth:
    _rates(training, 1)
    return Truth(training.at, [name for name, p in training.model.named_parameters() if p.ndim == 1])


def _weight_decay(training: Training) -> Truth:
    group, factor = training.optimizer.param_groups[0], 1000.0 if training.case.loud else 30.0

    def plant() -> None:
        group["weight_decay"] *= factor

    training.once(plant)
    return Truth(training.at, [name for name, p in training.model.named_parameters() if p.ndim > 1])


def _clipping_off(training: Training) -> Truth:
    limit, good = training.clip, training.batch

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        training.clip = limit if step < training.at else None
        return good(step)

    training.batch = batch
    return Truth(training.at)


def _reset(training: Training) -> Truth:
    def plant() -> None:
        for state in training.optimizer.state.values():
            for name, value in state.items():
                if training.case.loud or name != "step":
                    value.zero_()

    training.once(plant)
    return Truth(training.at)


def _foreign(training: Training) -> Truth:
    """The moments of an earlier step, or of another training of the same model."""
    kept: dict[Any, torch.Tensor] = {}

    def plant(step: int) -> None:
        for parameter, state in training.optimizer.state.items():
            for name in state.keys() - {"step"}:
                if step == training.at // 2:
                    kept[parameter, name] = state[name].clone()
                elif step == training.at:
                    other = kept[parameter, name]
                    state[name].copy_(other.flatten().roll(1).view_as(other) * 3 if training.case.loud else other)

    training.before_update.append(plant)
    return Truth(training.at)


def _corrupted(training: Training) -> Truth:
    name, parameter = training.pick(least_ndim=2)

    def plant() -> None:
        noise = torch.randn(parameter.shape, generator=training.draw) * parameter.detach().std()
        with torch.no_grad():
            parameter.mul_(0).add_(noise, alpha=3) if training.case.loud else parameter.add_(noise, alpha=0.5)

    training.once(plant)
    return Truth(training.at, [name])


def _swapped(training: Training) -> Truth:
    named = training.named(least_ndim=2)
    pairs = [(a, b) for i, a in enumerate(named) for b in named[i + 1 :] if a[1].shape == b[1].shape]
    (first, one), (second, other) = pairs[_whole(training.draw, len(pairs))]

    def plant() -> None:
        with torch.no_grad():
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    training.once(plant)
    return Truth(training.at, [first, second])


def _dead_units(training: Training) -> Truth:
    name, bias = training.pick(last="up.bias" if isinstance(training.model, GPT) else "bias")

    def plant() -> None:
        units = torch.randperm(len(bias), generator=training.draw)[: len(bias) // (1 if training.case.loud else 4)]
        with torch.no_grad():
            bias[units] -= 100

    training.once(plant)
    return Truth(training.at, [name, name.replace("bias", "weight")])


def _frozen(training: Training) -> Truth:
    name, parameter = training.pick(least_ndim=2 if training.case.loud else 1)

    def plant() -> None:
        parameter.requires_grad_(False)
        parameter.grad = None

    training.once(plant)
    return Truth(training.at, [name])


def _updates_vanish(training: Training) -> Truth:
    return Truth(1, gradual=training.steps)


def _norm_grows(training: Training) -> Truth:
    name, parameter = training.pick(least_ndim=2)
    strength = 30.0 if training.case.loud else 5.0

    def outwards(gradient: torch.Tensor) -> torch.Tensor:
        weight = parameter.detach()
        return gradient - strength * gradient.norm() / weight.norm() * weight

    good = training.batch

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == training.at:
            parameter.register_hook(outwards)
        return good(step)

    training.batch = batch
    return Truth(training.at, [name], gradual=20)


def _embedding_row(training: Training) -> Truth:
    weight = training.model.get_parameter("tokens.weight")

    def plant() -> None:
        with torch.no_grad():
            row = weight[_whole(training.draw, _VOCABULARY)]
            row.mul_(100 if training.case.loud else 8)

    training.once(plant)
    return Truth(training.at, ["tokens.weight"])


def _not_finite(training: Training) -> Truth:
    name, parameter = training.pick()

    def plant() -> None:
        with torch.no_grad():
            parameter.flatten()[: None if training.case.loud else 1] = math.nan if training.case.loud else math.inf

    training.once(plant)
    return Truth(training.at, [name])


CAUSES: Final[dict[str, Callable[[Training], Truth]]] = {
    "nothing": _nothing,
    "bad batch": _bad_batch,
    "learning rate": _learning_rate,
    "learning rate of a group": _group_rate,
    "weight decay": _weight_decay,
    "clipping off": _clipping_off,
    "optimizer state reset": _reset,
    "foreign optimizer state": _foreign,
    "layer corrupted": _corrupted,
    "layers swapped": _swapped,
    "dead units": _dead_units,
    "frozen": _frozen,
    "updates vanish": _updates_vanish,
    "norm grows": _norm_grows,
    "embedding row": _embedding_row,
    "not finite": _not_finite,
}
"""Cause, by the word that `diagnose` has for it -> its plant."""
