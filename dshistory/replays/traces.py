"""Two runs compared by their fingerprints: step by step, also where neither has a checkpoint.

A fingerprint covers every byte of a small tensor and a sample of a larger one. Where two differ the tensors differ;
where they agree, the sampled bytes do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from catalog.format.fingerprints import StepFingerprint, TensorTable
from catalog.paths import HistoryPaths
from catalog.read.fingerprints import fingerprinted_ranks, fingerprints_of

__all__ = ["Stretch", "TraceStep", "compared_traces"]

_NAMED = 3
_SAMPLES = frozenset({"sampled", "device"})


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a training: the steps of one run with `after < step <= until`."""

    run: str
    after: int
    until: int | None


@dataclass(slots=True)
class TraceStep:
    """The comparison of one step: how many tensors of all ranks were compared, how many of them by a sample, how many
    differ, and the first of these as (rank, label)."""

    compared: int = 0
    sampled: int = 0
    differing: int = 0
    first: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        """Name what differs."""
        named = ", ".join(f"{label} of rank {rank}" for rank, label in self.first[:1])
        return named if self.differing == 1 else f"{named}, and {self.differing - 1} more tensors"


def compared_traces(paths: HistoryPaths, before: Sequence[Stretch], run: str) -> Mapping[int, TraceStep]:
    """Compare the steps of `run` with those of the stretches `before`, rank by rank; the steps that both have, by step.
    Tensors that only one of them has, or in another cut, or that were looked at in another way, are left out."""
    found: dict[int, TraceStep] = {}
    ranks = set(fingerprinted_ranks(paths, run))
    for rank in sorted(ranks & {rank for one in before for rank in fingerprinted_ranks(paths, one.run)}):
        old = _of_stretches(paths, before, rank)
        then = next(old, None)
        for now in fingerprints_of(paths, run, rank, after=before[0].after):
            while then is not None and then.step < now.step:
                then = next(old, None)
            if then is None:
                break
            if then.step == now.step:
                _add(found.setdefault(now.step, TraceStep()), then, now)
    return dict(sorted((step, one) for step, one in found.items() if one.compared))


def _of_stretches(paths: HistoryPaths, stretches: Sequence[Stretch], rank: int) -> Iterator[StepFingerprint]:
    for one in stretches:
        yield from fingerprints_of(paths, one.run, rank, after=one.after, until=one.until)


def _add(total: TraceStep, then: StepFingerprint, now: StepFingerprint) -> None:
    places, sampled = _same_tensors(then.table, now.table)
    differing = places[then.digests[places[:, 0]] != now.digests[places[:, 1]], 1]
    total.compared += len(places)
    total.sampled += sampled
    total.differing += len(differing)
    if len(total.first) < _NAMED:
        named = ((now.rank, now.table.tensors[index].label) for index in differing[:_NAMED].tolist())
        total.first = (*total.first, *named)[:_NAMED]


@lru_cache(maxsize=64)
def _same_tensors(before: TensorTable, after: TensorTable) -> tuple[npt.NDArray[np.intp], int]:
    """Return the places of each tensor that both have, intp [tensors, 2], and how many of them are only sampled."""
    known = {tensor: place for place, tensor in enumerate(before.tensors) if tensor.coverage != "none"}
    both = [(known[tensor], place) for place, tensor in enumerate(after.tensors) if tensor in known]
    sampled = sum(after.tensors[place].coverage in _SAMPLES for _, place in both)
    return np.array(both, np.intp).reshape(-1, 2), sampled
