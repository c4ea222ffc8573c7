"""The fingerprints of a run, step by step, and what they say of ranks that should hold the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from catalog.format.fingerprints import StepFingerprint, TracedTensor
from catalog.history import History
from catalog.read.fingerprints import fingerprinted_ranks, fingerprints_of
from dshistory.display.formats import counted
from dshistory.display.table import Table
from native import checksum

__all__ = ["fingerprints", "rank_agreement"]

_STEPS: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int64()),
        ("tensors", pa.int64()),
        ("whole", pa.int64()),
        ("sampled", pa.int64()),
        ("digest", pa.string()),
    ]
)
_ALL_BYTES: Final = frozenset({"whole", "hash", "device_hash"})
_SAMPLES: Final = frozenset({"sampled", "device"})

_DISAGREEING: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("step", pa.int64()),
        ("last", pa.int64()),
        ("steps", pa.int64()),
        ("ranks", pa.list_(pa.list_(pa.int64()))),
    ]
)


def fingerprints(history: History, run: str) -> Table:
    """See `Explorer.fingerprints`."""
    found = (
        one for rank in fingerprinted_ranks(history.paths, run) for one in fingerprints_of(history.paths, run, rank)
    )
    rows = sorted((_row(one) for one in found), key=lambda row: (row["step"], row["rank"]))
    note = f"{counted(len({row['step'] for row in rows}), 'step')} of run {run}" if rows else _none_of(run)
    return Table(pa.Table.from_pylist(rows, schema=_STEPS), note=note)


def _row(one: StepFingerprint) -> dict[str, Any]:
    coverage = [tensor.coverage for tensor in one.table.tensors]
    return {
        "step": one.step,
        "rank": one.rank,
        "tensors": len(coverage),
        "whole": sum(each in _ALL_BYTES for each in coverage),
        "sampled": sum(each in _SAMPLES for each in coverage),
        "digest": checksum(one.table.id + one.digests.tobytes())[:8].hex(),
    }


def _none_of(run: str) -> str:
    return f"run {run} has no fingerprints: it was captured without, or by an earlier release"


@dataclass(slots=True)
class _Apart:
    """A tensor that some ranks hold differently: the first and the last such step, their number, and at the first step
    the ranks that hold the same, the most first."""

    step: int
    ranks: list[list[int]]
    last: int = 0
    steps: int = field(default=0)


def rank_agreement(history: History, run: str) -> Table:
    """See `Explorer.rank_agreement`."""
    apart: dict[TracedTensor, _Apart] = {}
    steps = replicated = 0
    ranks = fingerprinted_ranks(history.paths, run)
    for step, of_step in _together([fingerprints_of(history.paths, run, rank) for rank in ranks]):
        steps += 1
        if replicated and _all_equal(of_step):
            continue
        shared = {tensor: held for tensor, held in _held(of_step).items() if len(held) > 1}
        replicated = max(replicated, len(shared))
        for tensor, held in shared.items():
            if len(set(held.values())) > 1:
                found = apart.setdefault(tensor, _Apart(step, _groups(held)))
                found.last, found.steps = step, found.steps + 1
    rows = [
        {
            "kind": tensor.kind,
            "name": tensor.name,
            "step": one.step,
            "last": one.last,
            "steps": one.steps,
            "ranks": one.ranks,
        }
        for tensor, one in sorted(apart.items(), key=lambda pair: pair[1].step)
    ]
    return Table(
        pa.Table.from_pylist(rows, schema=_DISAGREEING), note=_agreement(run, rows, ranks, steps, replicated=replicated)
    )


def _agreement(run: str, rows: list[dict[str, Any]], ranks: Sequence[int], steps: int, *, replicated: int) -> str:
    if not ranks:
        return _none_of(run)
    if not replicated:
        return f"no tensor of run {run} is on several of its {counted(len(ranks), 'rank')}: there is nothing to compare"
    if not rows:
        return (
            f"{counted(replicated, 'tensor')} on several ranks agree at {counted(steps, 'step')}, as far as was sampled"
        )
    first = rows[0]
    return (
        f"{len(rows)} of {counted(replicated, 'tensor')} on several ranks differ, first at step {first['step']}: "
        f"{first['kind']} {first['name']!r}, where the ranks {' and '.join(map(str, first['ranks']))} hold the same"
    )


def _held(of_step: Sequence[StepFingerprint]) -> dict[TracedTensor, dict[int, int]]:
    """Return the digest of each replicated tensor on each rank that has it; partitions, and what is a rank's own, are
    left out."""
    held: dict[TracedTensor, dict[int, int]] = {}
    for one in of_step:
        for tensor, digest in zip(one.table.tensors, one.digests.tolist(), strict=True):
            if tensor.placement == "replicated" and tensor.coverage != "none":
                held.setdefault(tensor, {})[one.rank] = digest
    return held


def _all_equal(of_step: Sequence[StepFingerprint]) -> bool:
    """Return whether the ranks hold the same tensors with the same digests, all of them: most steps of most runs."""
    first = of_step[0]
    return all(one.table.id == first.table.id and np.array_equal(one.digests, first.digests) for one in of_step[1:])


def _groups(held: dict[int, int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank, digest in sorted(held.items()):
        groups.setdefault(digest, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def _together(ranks: Sequence[Iterator[StepFingerprint]]) -> Iterator[tuple[int, list[StepFingerprint]]]:
    """Yield each step with what the ranks have of it, if there are several."""
    heads = [next(one, None) for one in ranks]
    while any(head is not None for head in heads):
        step = min(head.step for head in heads if head is not None)
        of_step = [head for head in heads if head is not None and head.step == step]
        if len(of_step) > 1:
            yield step, of_step
        heads = [
            next(one, None) if head is not None and head.step == step else head
            for head, one in zip(heads, ranks, strict=True)
        ]
