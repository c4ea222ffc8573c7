"""A training in this process: what a verb gets to put it back to a step and to train on."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from capture.collectives import Ranks
from capture.loops.select import loop_for
from dshistory.user_functions import number_of

__all__ = ["Batches", "Live"]

Batches = Any
"""An iterable with state_dict and load_state_dict, or a function of the step that returns its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A training in this process, in the meaning of `Explorer.replay`."""

    train_step: Callable[[Any], Any] | None
    engine: Any
    model: Any
    optimizer: Any
    scheduler: Any
    scaler: Any
    dataloader: Batches
    providers: Sequence[Any]

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the training that is given among the arguments of a verb, by the names that all such verbs have."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def given(self) -> list[Any]:
        """Return every value."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @property
    def target(self) -> Any:
        """The engine, or the model."""
        return self.model if self.engine is None else self.engine

    def ranks(self) -> Ranks:
        """Return this process among those that train together. SetupError for what is no training."""
        loop = loop_for(self.target, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        return Ranks(*loop.ranks())

    def loss_on(self, batch: Any, *, verb: str) -> float | None:
        """Train on a batch and return this rank's loss; None where `train_step` returns none. SetupError, which names
        the verb, for what is no number."""
        assert self.train_step is not None, "verbs check that one is given"
        loss = self.train_step(batch)
        wanted = "let it return the loss, or None"
        return None if loss is None else number_of(loss, what=f"{verb}: train_step", wanted=wanted)

    def mean_losses_on(self, batches: Iterable[Any], *, verb: str) -> list[float | None]:
        """Train on these batches, of which each rank has its own; return the mean loss over the ranks for each, None
        where a rank has none. Every rank calls it."""
        ranks = self.ranks()
        mine = ranks.agree(f"{verb}: training", lambda: [self.loss_on(batch, verb=verb) for batch in batches])
        by_rank = zip(*ranks.gather(mine), strict=True)
        return [None if None in losses else statistics.fmean(losses) for losses in by_rank]
